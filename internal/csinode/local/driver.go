package local

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

const (
	maxAnswer = 1 << 20  // bytes of an answer of a driver
	maxHeader = 64 << 10 // bytes of its headers, which have the texts of errors
)

// limits are the time limits of calls about volumes.
type limits struct {
	change time.Duration // for a call that stages, publishes, grows or undoes one
	ask    time.Duration // for a call that only asks

	register time.Duration // for drivers to register before Release gives them up
}

var defaultLimits = limits{change: 2 * time.Minute, ask: time.Minute, register: 10 * time.Second}

// driver is a registered driver. It never changes.
type driver struct {
	csinode.Driver
	endpoint string
	version  version // the highest that it supports
	can      map[csi.NodeServiceCapability_RPC_Type]bool
	since    int64 // counts registrations
}

// call connects to a unix socket and calls f. A connection serves one call: a driver may be replaced between two.
func call(ctx context.Context, socket string, limit time.Duration, f func(context.Context, grpc.ClientConnInterface) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///csi",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(maxHeader),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	)
	if err != nil {
		return fmt.Errorf("prepare a client of %s: %w", socket, err)
	}
	err = f(ctx, conn)
	if closed := conn.Close(); err == nil { // not errors.Join, which hides the text of a status
		err = closed
	}
	return err
}

// node calls the node service of the driver. secrets do not appear in the error.
// Errors: the classes of the driver's status; Unavailable if the call can be tried again.
func (d *driver) node(ctx context.Context, op string, limit time.Duration, secrets map[string]string, f func(context.Context, csi.NodeClient) error) error {
	err := call(ctx, d.endpoint, limit, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		return f(ctx, csi.NewNodeClient(conn))
	})
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of CSI driver %s: %w", op, d.Name, classify(ctx, err, secrets))
}

// classify gives the error of a call its class. ctx is that of the caller.
func classify(ctx context.Context, err error, secrets map[string]string) error {
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	text := s.Message()
	for _, secret := range secrets {
		if len(secret) > 3 { // shorter ones are parts of words
			text = strings.ReplaceAll(text, secret, "***")
		}
	}
	code := s.Code()
	if (code == codes.DeadlineExceeded || code == codes.Canceled) && over(ctx) {
		code = status.FromContextError(ctx.Err()).Code()
	}
	err = grpcerr.FromStatus(status.Error(code, text))
	switch code {
	case codes.Aborted, codes.DeadlineExceeded, codes.Canceled:
		if ctx.Err() == nil {
			return errdefs.Unavailablef("%s; try again", err.Error())
		}
	default: // the class of the status says it
	}
	return err
}

// deadlineSlack is how much earlier than a caller a driver may see the caller's deadline, which gRPC tells it.
const deadlineSlack = 100 * time.Millisecond

// over reports whether a call that ended was ended by ctx.
func over(ctx context.Context) bool {
	if at, ok := ctx.Deadline(); ok && time.Until(at) <= deadlineSlack {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// capability returns what a driver is told about how a volume is used.
func (d *driver) capability(r *csinode.Request) *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_Mode(csi.VolumeCapability_AccessMode_Mode_value[r.Mode])
	if !d.can[csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER] &&
		(mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER) {
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	}
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if r.Access == csinode.AsDevice {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		return c
	}
	m := &csi.VolumeCapability_MountVolume{FsType: r.FSType, MountFlags: r.MountFlags}
	if d.groups(r) {
		m.VolumeMountGroup = r.Group
	}
	c.AccessType = &csi.VolumeCapability_Mount{Mount: m}
	return c
}

// groups reports whether the driver gives the files to the group of r.
func (d *driver) groups(r *csinode.Request) bool {
	return r.Access == csinode.AsFolder && r.Group != "" && d.can[csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP]
}
