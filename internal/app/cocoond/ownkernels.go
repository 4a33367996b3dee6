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

// Check implements microvm.Files.
func (o ownKernels) Check(kernel, rootfs string) error {
	for _, path := range []string{kernel, rootfs} {
		f, _, err := o.open(path)
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
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
func (o ownKernels) Ready(ctx context.Context, kernel, rootfs string) (kernelImage, rootfsImage string, err error) {
	if kernelImage, err = o.ready(ctx, "kernel", kernel, o.importKernel); err != nil {
		return "", "", fmt.Errorf("kernel %s: %w", kernel, err)
	}
	if rootfsImage, err = o.ready(ctx, "rootfs", rootfs, func(ctx context.Context, image string, f *os.File, _ int64) error {
		_, err := o.images.Import(ctx, image, f, nil)
		return err
	}); err != nil {
		return "", "", fmt.Errorf("file system %s: %w", rootfs, err)
	}
	return kernelImage, rootfsImage, nil
}

func (o ownKernels) ready(ctx context.Context, what, path string, store func(ctx context.Context, image string, f *os.File, size int64) error) (string, error) {
	f, info, err := o.open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", errdefs.Unsupportedf("the file system does not tell when the file has changed")
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d %d %d %d", path, st.Dev, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()))
	image := workload.OwnImages + what + ":" + hex.EncodeToString(sum[:16])
	if _, err := o.images.Get(ctx, image); !errdefs.IsNotFound(err) {
		return image, err
	}
	return image, store(ctx, image, f, info.Size())
}

// importKernel makes an image with one file.
func (o ownKernels) importKernel(ctx context.Context, image string, f *os.File, size int64) error {
	if size > vm.MaxKernelFile {
		return errdefs.Invalidf("it has %d bytes; at most %d are possible", size, int64(vm.MaxKernelFile))
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		var head bytes.Buffer
		w := tar.NewWriter(&head)
		if err := w.WriteHeader(&tar.Header{Name: microvm.KernelFile[1:], Mode: 0o444, Size: size}); err != nil {
			return nil, err
		}
		end := make([]byte, (512-size%512)%512+1024) // of the file, and of the archive
		return io.NopCloser(io.MultiReader(&head, io.NewSectionReader(f, 0, size), bytes.NewReader(end))), nil
	}, tarball.WithCompressionLevel(1))
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
