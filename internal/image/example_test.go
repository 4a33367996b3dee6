package image_test

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// A store recognises an image by its content and makes the disks of a VM from it.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	concrete, err := local.New(local.Config{Dir: dir, Arch: "amd64"})
	if err != nil {
		fmt.Println(err)
		return
	}
	var store image.Store = concrete
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa // the signature of a boot sector
	img, err := store.Import(ctx, "appliance", bytes.NewReader(disk), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	root, err := store.Prepare(ctx, img, image.Layout{Dir: dir, Storage: 1 << 30})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, d := range root.Disks {
		fmt.Println(img.Name, img.Type, d.Serial, d.ReadOnly)
	}
	// Output: appliance:latest cloudimg cocoon-disk false
}
