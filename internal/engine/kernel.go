package engine

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// A disk guest can boot a kernel and an initrd of an image. The VM's folder has copies of the two files. The engine makes them when it creates the
// VM, and again when the VM starts without them. The image stays as long as the VM.
const (
	kernelFile = "kernel"
	initrdFile = "initrd"
)

func (d folders) kernel(id vm.ID) string { return filepath.Join(d.state(id), kernelFile) }
func (d folders) initrd(id vm.ID) string { return filepath.Join(d.state(id), initrdFile) }

// ofKernel reports whether v has the files of the kernel of s, which only the node reads.
func ofKernel(s vm.Spec, v vm.Volume) bool { return s.Kernel() != nil && s.Kernel().Volume == v.Name }

// bootsKernel returns b for a guest of s, which boots the kernel of an image if it says so.
func (d folders) bootsKernel(id vm.ID, s vm.Spec, b vm.Boot) vm.Boot {
	if k := s.Kernel(); k != nil {
		b.Kernel, b.Cmdline = d.kernel(id), k.Args
		if k.Initrd != "" {
			b.Initrd = d.initrd(id)
		}
	}
	return b
}

// layKernel copies the files of the kernel of r out of their image, unless they are there, and returns their checksums.
// Errors: NotFound, InvalidArgument (a file that is none, or too large).
func (n *node) layKernel(ctx context.Context, r vm.Record) (sums vm.KernelSums, err error) {
	k := r.Spec.Kernel()
	if k == nil || r.ImageType == vm.ImageOCI {
		return sums, nil
	}
	var kernel, initrd int64
	if kernel, sums.Kernel, err = n.layKernelFile(ctx, r, k.Path, n.dirs.kernel(r.ID), r.KernelSums.Kernel); err != nil {
		return sums, fmt.Errorf("kernel: %w", err)
	}
	if k.Initrd != "" {
		if initrd, sums.Initrd, err = n.layKernelFile(ctx, r, k.Initrd, n.dirs.initrd(r.ID), r.KernelSums.Initrd); err != nil {
			return sums, fmt.Errorf("initrd: %w", err)
		}
	}
	if kernel+initrd >= r.Spec.Memory {
		return sums, errdefs.Invalidf("its kernel %s with its initrd has %d bytes, and its memory only %d; give it more memory", k.Path, kernel+initrd, r.Spec.Memory)
	}
	return sums, nil
}

// layKernelFile copies the file at path in the image with the kernel of r to the file at, unless that is there, and returns its size
// and its checksum. known is that of a file that is there; 0: it is read.
func (n *node) layKernelFile(ctx context.Context, r vm.Record, path, at string, known uint32) (size int64, sum uint32, err error) {
	st, err := os.Lstat(at)
	switch {
	case err == nil && st.Mode().IsRegular():
		if known == 0 {
			known, err = sumOf(at)
		}
		return st.Size(), known, err
	case err == nil:
		return 0, 0, errdefs.Preconditionf("%s is not a file; remove it", at)
	case !errors.Is(err, fs.ErrNotExist):
		return 0, 0, err
	}
	opener, ok := n.images.(image.FileOpener)
	i := slices.IndexFunc(r.ImageVolumes, func(v vm.ImageVolume) bool { return v.Volume == r.Spec.Kernel().Volume })
	if !ok || i < 0 {
		return 0, 0, errdefs.Unsupportedf("this node cannot read the files of images")
	}
	img, err := n.images.Get(vm.OnBehalf(ctx, vm.Owner{}), r.ImageVolumes[i].ImageDigest) // the VM uses it already
	if err != nil {
		return 0, 0, err
	}
	f, err := opener.OpenFile(ctx, img, path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	if f.Size > vm.MaxKernelFile {
		return 0, 0, errdefs.Invalidf("the file %s of image %s has %d bytes; at most %d are possible", path, img.Name, f.Size, int64(vm.MaxKernelFile))
	}
	digest := crc32.NewIEEE()
	err = atomicfile.Write(at, 0o444, func(w io.Writer) error { // the unprivileged hypervisor reads it
		_, err := io.Copy(io.MultiWriter(w, digest), f)
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("copy %s out of image %s: %w", path, img.Name, err)
	}
	return f.Size, digest.Sum32(), nil
}

// sumOf returns the checksum of a file.
func sumOf(path string) (uint32, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	digest := crc32.NewIEEE()
	_, err = io.Copy(digest, f)
	return digest.Sum32(), err
}
