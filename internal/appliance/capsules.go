package appliance

import (
	"cmp"
	"context"
	"errors"
	"io"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// System is the machine itself. On a machine that does not boot Cocoon's own system, updates and reboots are refused.
type System interface {
	// Info describes the machine. The door adds its identity.
	Info(ctx context.Context) (*capsulev1.GetInfoResponse, error)
	// Logs calls write with parts of the log of the daemon: the last lines, or all if tail is 0, and what follows until ctx ends.
	Logs(ctx context.Context, tail int, follow bool, write func([]byte) error) error
	// Update writes the update that r returns to the slot that is not in use, and has the machine reboot into it. about says what r returns and how the trial ends.
	Update(ctx context.Context, r io.Reader, about *capsulev1.UpdateOSMetadata) (slot, version string, err error)
	// Confirm ends the trial of an update. Errors: FailedPrecondition if there is none.
	Confirm(ctx context.Context) (slot, version string, err error)
	// Reboot has the machine reboot soon.
	Reboot(ctx context.Context) error
	// GrowDisk gives state and volumes the room that the disk of the system has behind them. Without room it changes nothing.
	GrowDisk(ctx context.Context) (*capsulev1.GrowDiskResponse, error)
}

// capsules implements CapsuleService.
type capsules struct {
	capsulev1.UnimplementedCapsuleServiceServer
	door *Door
}

// GetInfo implements capsulev1.CapsuleServiceServer.
func (c *capsules) GetInfo(ctx context.Context, _ *capsulev1.GetInfoRequest) (*capsulev1.GetInfoResponse, error) {
	info, err := c.door.deps.System.Info(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range c.door.deps.Volumes.Pools(ctx) {
		info.ThinpoolTotalBytes += uint64(max(p.Size, 0))
		info.ThinpoolUsedBytes += uint64(max(p.Used, 0))
		info.VolumesFault = cmp.Or(info.VolumesFault, p.Fault)
	}
	if c.door.deps.Runs != nil {
		info.MicroVmsRun = c.door.deps.Runs(ctx)
	}
	if callerOf(ctx).Role < methods[capsulev1.CapsuleService_StreamLogs_FullMethodName].role {
		info.RolledBackLog = ""
	}
	k := c.door.deps.Identity
	info.CapsuleId, info.ShortId, info.TlsFingerprintSha256 = k.ID(), k.ShortID(), k.Fingerprint()
	return info, nil
}

// StreamLogs implements capsulev1.CapsuleServiceServer.
func (c *capsules) StreamLogs(req *capsulev1.CapsuleLogsRequest, stream capsulev1.CapsuleService_StreamLogsServer) error {
	return c.door.deps.System.Logs(stream.Context(), int(max(req.GetTailLines(), 0)), req.GetFollow(), func(p []byte) error {
		return stream.Send(&capsulev1.CapsuleLogChunk{Data: p})
	})
}

// UpdateOS implements capsulev1.CapsuleServiceServer.
func (c *capsules) UpdateOS(stream capsulev1.CapsuleService_UpdateOSServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	meta := first.GetMetadata()
	if meta == nil || meta.GetTotalBytes() == 0 || meta.GetSha256Hex() == "" {
		return errdefs.Invalidf("the first message of an update tells its size and its SHA-256")
	}
	r := &chunks{next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}}
	slot, version, err := c.door.deps.System.Update(stream.Context(), r, meta)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&capsulev1.UpdateOSResponse{NextSlot: slot, NextVersion: version, RebootScheduled: true})
}

// UpdateConfirm implements capsulev1.CapsuleServiceServer.
func (c *capsules) UpdateConfirm(ctx context.Context, _ *capsulev1.UpdateConfirmRequest) (*capsulev1.UpdateConfirmResponse, error) {
	slot, version, err := c.door.deps.System.Confirm(ctx)
	if err != nil {
		return nil, err
	}
	return &capsulev1.UpdateConfirmResponse{CommittedSlot: slot, CommittedVersion: version}, nil
}

// RebootNode implements capsulev1.CapsuleServiceServer.
func (c *capsules) RebootNode(ctx context.Context, _ *capsulev1.RebootNodeRequest) (*capsulev1.RebootNodeResponse, error) {
	if err := c.door.deps.System.Reboot(ctx); err != nil {
		return nil, err
	}
	return &capsulev1.RebootNodeResponse{Message: "the machine reboots"}, nil
}

// GrowDisk implements capsulev1.CapsuleServiceServer.
func (c *capsules) GrowDisk(ctx context.Context, _ *capsulev1.GrowDiskRequest) (*capsulev1.GrowDiskResponse, error) {
	return c.door.deps.System.GrowDisk(ctx)
}

// chunks reads the messages of a stream as bytes.
type chunks struct {
	next func() ([]byte, error) // of one message
	rest []byte
	read int64
}

func (c *chunks) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		b, err := c.next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return 0, io.EOF
			}
			return 0, err
		}
		c.rest = b
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	c.read += int64(n)
	return n, nil
}
