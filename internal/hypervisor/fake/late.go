package fake

import (
	"context"
	"net"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/sparse"
)

// LoadsLate implements hypervisor.LateLoader. A guest runs when what it remembers is there; it needs no more of its memory, and so does not end without it.
func (d *Driver) LoadsLate() string { return "" }

// await waits until the first n bytes of a memory of size bytes are there.
func await(ctx context.Context, feed string, size, n int64) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", feed)
	if err != nil {
		return errdefs.Unavailablef("connect to what loads the memory: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if _, err := conn.Write(filling.Want(0)); err != nil {
		return errdefs.Unavailablef("ask for the memory: %w", err)
	}
	d, here, buf := filling.Decoder{Size: size}, sparse.NewPages(size), make([]byte, 4096)
	for at := int64(0); at < n; {
		k, err := conn.Read(buf)
		if err != nil {
			return errdefs.Unavailablef("hear of the memory: %w", err)
		}
		parts, err := d.Decode(buf[:k])
		if err != nil {
			return err
		}
		for here.Add(parts); at < n && here.Has(at/sparse.Block); {
			at += sparse.Block
		}
	}
	return nil
}
