package cocoond

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/google/go-containerregistry/pkg/name"
	registry "github.com/google/go-containerregistry/pkg/v1"
	noimage "github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"cocoonstack.io/cocoon/internal/appliance/microvm"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// ownKernels are kernels and file systems in a folder that the administrator of the machine fills. A VM boots copies of them: images,
// which are named after what the file system tells about a file, so that a file that changes becomes another image.
type ownKernels struct {
	dir    string
	images catalog.Images
}

var _ microvm.Files = ownKernels{}

// opened is a file of the folder.
type opened struct {
	*os.File
	path string
	info os.FileInfo
}

// Check implements microvm.Files.
func (o ownKernels) Check(b microvm.Boot) error {
	boot, err := o.openAll(bootPaths(b)...)
	if err != nil {
		return err
	}
	defer closeAll(boot)
	if err := checkBoot(boot); err != nil {
		return err
	}
	rootfs, err := o.openAll(b.Rootfs)
	closeAll(rootfs)
	return err
}

// bootNames are the files of the image of a kernel.
var bootNames = []string{microvm.KernelFile, microvm.InitramfsFile}

// bootPaths returns what becomes the files of bootNames; the last may be missing.
func bootPaths(b microvm.Boot) []string {
	if b.Initramfs == "" {
		return []string{b.Kernel}
	}
	return []string{b.Kernel, b.Initramfs}
}

// checkBoot returns an error unless the files of a kernel are small enough.
func checkBoot(files []opened) error {
	for _, f := range files {
		if f.info.Size() > vm.MaxKernelFile {
			return errdefs.Invalidf("%s has %d bytes; at most %d are possible", f.path, f.info.Size(), int64(vm.MaxKernelFile))
		}
	}
	return nil
}

// openAll opens files of the folder, all or none.
func (o ownKernels) openAll(paths ...string) (all []opened, err error) {
	for _, path := range paths {
		f, info, err := o.open(path)
		if err != nil {
			closeAll(all)
			return nil, err
		}
		all = append(all, opened{f, path, info})
	}
	return all, nil
}

func closeAll(files []opened) {
	for _, f := range files {
		f.Close()
	}
}

// open opens a file of the folder. No link leads out of it.
func (o ownKernels) open(path string) (*os.File, os.FileInfo, error) {
	rel, err := filepath.Rel(o.dir, path)
	if err != nil || !filepath.IsLocal(rel) || rel == "." {
		return nil, nil, errdefs.Invalidf("%.200q is not below %s, where kernels and file systems of VMs have to be", path, o.dir)
	}
	root, err := os.OpenRoot(o.dir)
	if err != nil {
		return nil, nil, errdefs.New(errdefs.FailedPrecondition, "kernels and file systems of VMs: %w; make the folder, and put them there", err)
	}
	defer root.Close()
	f, err := root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe does not block
	if err != nil {
		return nil, nil, errdefs.New(errdefs.FailedPrecondition, "a file of a VM: %w", err)
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() == 0) {
		err = errdefs.Invalidf("%s is not a file, or empty", path)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// Ready implements microvm.Files.
func (o ownKernels) Ready(ctx context.Context, b microvm.Boot) (kernelImage, rootfsImage string, err error) {
	if kernelImage, err = o.ready(ctx, "kernel", bootPaths(b), o.importBoot); err != nil {
		return "", "", fmt.Errorf("kernel %s: %w", b.Kernel, err)
	}
	if rootfsImage, err = o.ready(ctx, "rootfs", []string{b.Rootfs}, func(ctx context.Context, image string, files []opened) error {
		_, err := o.images.Import(ctx, image, files[0], nil)
		return err
	}); err != nil {
		return "", "", fmt.Errorf("file system %s: %w", b.Rootfs, err)
	}
	return kernelImage, rootfsImage, nil
}

// ready returns the image of files as they are now. store makes it if it is missing.
func (o ownKernels) ready(ctx context.Context, what string, paths []string, store func(ctx context.Context, image string, files []opened) error) (string, error) {
	files, err := o.openAll(paths...)
	if err != nil {
		return "", err
	}
	defer closeAll(files)
	sum := sha256.New()
	for _, f := range files {
		st, ok := f.info.Sys().(*syscall.Stat_t)
		if !ok {
			return "", errdefs.Unsupportedf("the file system does not tell when the file has changed")
		}
		fmt.Fprintf(sum, "%s %d %d %d %d %d", f.path, st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano())
	}
	image := workload.OwnImages + what + ":" + hex.EncodeToString(sum.Sum(nil)[:16])
	if _, err := o.images.Get(ctx, image); !errdefs.IsNotFound(err) {
		return image, err
	}
	return image, store(ctx, image, files)
}

// importBoot makes an image with the files of a kernel.
func (o ownKernels) importBoot(ctx context.Context, image string, files []opened) error {
	if err := checkBoot(files); err != nil {
		return err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return archive(files) }, tarball.WithCompressionLevel(1))
	if err != nil {
		return fmt.Errorf("read it: %w", err)
	}
	img, err := mutate.ConfigFile(noimage.Image, &registry.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: registry.RootFS{Type: "layers"}})
	if err == nil {
		img, err = mutate.AppendLayers(img, layer)
	}
	if err != nil {
		return err
	}
	ref, err := name.NewTag(image)
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	written := make(chan struct{})
	go func() { // ends with the import, which closes the pipe
		defer close(written)
		w.CloseWithError(tarball.Write(ref, img, w))
	}()
	_, err = o.images.Import(ctx, image, r, nil)
	r.CloseWithError(errors.Join(err, io.ErrClosedPipe))
	<-written
	return err
}

// archive returns a tar archive of the files of a kernel, which is made while it is read.
func archive(files []opened) (io.ReadCloser, error) {
	var parts []io.Reader
	for i, f := range files {
		var head bytes.Buffer
		size := f.info.Size()
		if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: bootNames[i][1:], Mode: 0o444, Size: size}); err != nil {
			return nil, err
		}
		parts = append(parts, &head, io.NewSectionReader(f, 0, size), bytes.NewReader(make([]byte, (512-size%512)%512)))
	}
	return io.NopCloser(io.MultiReader(append(parts, bytes.NewReader(make([]byte, 1024)))...)), nil
}
