package catalog

import (
	"context"
	"io"
	"net"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Peer is the part of another node's API that fetches snapshots from it.
type Peer interface {
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	ExportSnapshot(ctx context.Context, ref string, w io.Writer) error
	Close() error
}

// parsePeer splits cocoon://HOST:PORT/NAME.
func parsePeer(from string) (addr, name string, err error) {
	addr, name, _ = strings.Cut(strings.TrimPrefix(from, snapshot.PeerScheme), "/")
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" || port == "" || name == "" || strings.Contains(name, "/") {
		return "", "", errdefs.Invalidf("%q is not cocoon://HOST:PORT/SNAPSHOT", from)
	}
	return addr, name, nil
}

// pullFromPeer passes another node's export to the store, which verifies it file by file and lists it when it is
// complete.
func (s *Snapshots) pullFromPeer(ctx context.Context, from, name string, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	addr, ref, err := parsePeer(from)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	if s.Dial == nil {
		return snapshot.Snapshot{}, errdefs.Preconditionf("%s: this node has no certificate for other nodes; set peer: {ca, cert, key} in cocoond's configuration", from)
	}
	peer, err := s.Dial(addr)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer peer.Close()
	theirs, err := peer.GetSnapshot(ctx, ref)
	if err != nil {
		return snapshot.Snapshot{}, errdefs.New(errdefs.ClassOf(err), "pull %s: %w", from, err)
	}
	// A peer with a release from before owners answers everybody, with the state of VMs whose names two namespaces
	// may share.
	if who := vm.Behalf(ctx); !who.Operator() && theirs.Owner.Operator() && !who.Invited(theirs.Published) {
		return snapshot.Snapshot{}, errdefs.NotFoundf("pull %s: the node does not confirm that the snapshot belongs to namespace %s; upgrade that node", from, who.Namespace)
	}
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		err := peer.ExportSnapshot(ctx, theirs.ID, w)
		w.CloseWithError(err) // nil is the end of the stream
		sent <- err
	}()
	got, err := s.Store.Import(ctx, name, "", r, func(n int64) {
		progress(snapshot.Progress{Phase: "fetching", Done: n, Total: theirs.Size, Moved: n})
	})
	r.CloseWithError(io.ErrClosedPipe) // ends an export that the store does not read completely
	cancel()
	exportErr := <-sent
	switch {
	case err == nil:
		return got, nil
	case exportErr != nil && errdefs.IsUnavailable(exportErr): // this is the cause, which the store cannot know
		err = exportErr
	}
	return snapshot.Snapshot{}, errdefs.New(errdefs.ClassOf(err), "pull %s: %w", from, err)
}
