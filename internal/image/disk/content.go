package disk

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Content reads the bytes that a guest sees of the disk f, which passed the checks of its format, and says how many there are.
// Errors: DataLoss, InvalidArgument for a format that is converted before a VM boots from it.
func Content(format vm.DiskFormat, f *os.File) (r sparse.Holed, size int64, err error) {
	switch format {
	case vm.DiskRaw:
		r, err := sparse.ReadFile(f)
		if err != nil {
			return nil, 0, fmt.Errorf("read the disk image: %w", err)
		}
		return r, r.Size(), nil
	case vm.DiskQCOW2:
		return qcow2Content(f)
	}
	return nil, 0, errdefs.Invalidf("disks of the format %q are not read, only converted", format)
}

func qcow2Content(f *os.File) (sparse.Holed, int64, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, fmt.Errorf("read the disk image: %w", err)
	}
	head := make([]byte, min(qcow2.HeadSize, info.Size()))
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, info.Size()), head); err != nil {
		return nil, 0, fmt.Errorf("read the disk image: %w", err)
	}
	q, err := qcow2.Parse(head)
	if err != nil {
		return nil, 0, err
	}
	r, err := q.Content(f, info.Size(), Inflate())
	if err != nil {
		return nil, 0, err
	}
	return r, q.VirtualSize, nil
}

// Inflate returns a function that decompresses clusters of qcow2 disks, for one goroutine at a time.
func Inflate() qcow2.Inflate {
	var deflated io.ReadCloser
	var z *zstd.Decoder
	return func(method uint8, in, out []byte) (err error) {
		src := bytes.NewReader(in)
		if method == qcow2.Zstd {
			if z == nil {
				z, err = zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(8<<20))
			} else {
				err = z.Reset(src)
			}
			if err == nil {
				_, err = io.ReadFull(z, out)
			}
			return err
		}
		if deflated == nil {
			deflated = flate.NewReader(src)
		} else if err := deflated.(flate.Resetter).Reset(src, nil); err != nil {
			return err
		}
		_, err = io.ReadFull(deflated, out)
		return err
	}
}
