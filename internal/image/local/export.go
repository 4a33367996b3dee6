package local

import (
	"context"
	"fmt"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/vm"
)

// Export writes a disk image's file, the one that VMs boot from. A disk that was converted at import is exported as qcow2;
// importing that gives another id.
//
// A container image becomes an OCI image layout with its original layers, uncompressed, and keeps its id.
// Errors: NotFound, Unsupported (layers that were merged), DataLoss.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) error {
	img, err := s.Get(ctx, ref)
	if err != nil {
		return err
	}
	if img.Type != vm.ImageDisk {
		return s.exportOCI(ctx, img, w)
	}
	f, err := s.openDisk(img.ID)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyBuffer(w, &source{ctx: ctx, r: f}, make([]byte, 1<<20)); err != nil {
		return fmt.Errorf("export image %s: %w", orID(img), err)
	}
	return nil
}

// openDisk opens a disk's file. It stays readable if the image is removed meanwhile.
func (s *Store) openDisk(id string) (*os.File, error) {
	rec, err := s.use(id)
	if err != nil {
		return nil, err
	}
	hex, _ := hexOf(rec.ID)
	f, err := os.Open(s.path("data", hex, rec.File))
	if err != nil {
		return nil, fmt.Errorf("export image %s: %w", rec.ID, err)
	}
	return f, nil
}
