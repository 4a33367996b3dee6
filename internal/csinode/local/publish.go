package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/undo"
)

// plainNames are used in paths as they are; other names are not.
var plainNames = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)

// pathPart returns a folder name for name. No two names have the same, and "" has one too.
func pathPart(name string) string {
	switch {
	case name == "":
		return "_"
	case plainNames.MatchString(name):
		return name
	}
	return "_" + id("name", name)
}

// target returns where a volume is published.
func (n *Node) target(k csinode.Key) string {
	return filepath.Join(n.Root(), pathPart(k.Owner.Namespace), pathPart(k.Holder), pathPart(k.Name), "mount")
}

// staging returns where a volume is staged.
func (n *Node) staging(driver, volume string) string {
	return n.below(stagedName, driver, volume, "globalmount")
}

// stagingOf returns the staging path for calls to a driver about a publication; "" if the volume is not staged.
func (n *Node) stagingOf(r record) string {
	if !r.Staged {
		return ""
	}
	return n.staging(r.Driver, volumeID(r.Driver, r.Handle))
}

// lockBoth waits for the locks of a key and of a volume.
func (n *Node) lockBoth(ctx context.Context, k csinode.Key, volume func() (string, error)) (release func(), err error) {
	key, err := n.keys.Lock(ctx, keyID(k))
	if err != nil {
		return nil, err
	}
	of, err := volume()
	if err != nil {
		key()
		return nil, err
	}
	both, err := n.volumes.Lock(ctx, of)
	if err != nil {
		key()
		return nil, err
	}
	return func() { both(); key() }, nil
}

// Publish stages a volume if its driver wants that, and publishes it. If it is published completely since the machine started, Publish
// asks no driver. After an error, the volume may be published in part: call Publish again, or Unpublish.
//
// Errors: InvalidArgument; FailedPrecondition if the same key is published otherwise, if another holder excludes this one, or if the driver
// published something else; Unavailable if the driver is not registered or asks for another attempt; DataLoss; the classes of the driver.
func (n *Node) Publish(ctx context.Context, r csinode.Request) (csinode.Published, error) {
	p, err := n.publish(ctx, r)
	if err != nil {
		return csinode.Published{}, fmt.Errorf("publish %s: %w", r.Key, err)
	}
	return p, nil
}

func (n *Node) publish(ctx context.Context, r csinode.Request) (csinode.Published, error) {
	if err := validate(&r); err != nil {
		return csinode.Published{}, err
	}
	if r.Handle == "" {
		r.Handle = "csi-" + keyID(r.Key)
	}
	volume := volumeID(r.Driver, r.Handle)
	unlock, err := n.lockBoth(ctx, r.Key, func() (string, error) { return volume, nil })
	if err != nil {
		return csinode.Published{}, err
	}
	defer unlock()
	old, found, err := n.entry(r.Key)
	if err != nil {
		return csinode.Published{}, err
	}
	if found {
		if err := same(&r, old.rec); err != nil {
			return csinode.Published{}, err
		}
		if p := n.published(old.rec); p.Ready {
			if r.Again {
				err = n.again(ctx, &r, old.rec)
			}
			return p, err
		}
	}
	others := n.others(volume, r.Key)
	if err := admit(&r, others); err != nil {
		return csinode.Published{}, err
	}
	d, err := n.registry.driver(r.Driver)
	if err != nil {
		return csinode.Published{}, err
	}
	rec := record{
		Key: r.Key, Driver: r.Driver, Handle: r.Handle,
		Access: r.Access, Mode: r.Mode, FSType: r.FSType, ReadOnly: r.ReadOnly, Ephemeral: r.Ephemeral,
		Staged: !r.Ephemeral && (old.rec.Staged || d.can[csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME]), Grouped: d.groups(&r),
	}
	n.step("intent")
	if err := n.save(rec); err != nil {
		return csinode.Published{}, err
	}
	if err := n.act(ctx, d, &r, rec, others); err != nil {
		return csinode.Published{}, err
	}
	rec.Boot = n.boot
	n.step("done")
	if err := n.save(rec); err != nil {
		return csinode.Published{}, err
	}
	n.step("published")
	n.log.Info("CSI volume published", "driver", rec.Driver, "volume", rec.Key.String())
	return n.published(rec), nil
}

// act makes the driver stage and publish a volume whose record says that this may have happened.
func (n *Node) act(ctx context.Context, d *driver, r *csinode.Request, rec record, others []entry) error {
	staging, target := n.stagingOf(rec), n.target(r.Key)
	n.step("folders")
	if err := n.makeParents(staging, filepath.Dir(target)); err != nil {
		return err
	}
	capability := d.capability(r)
	if staging != "" && d.can[csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME] && !n.isStaged(others) {
		n.step("stage")
		if err := d.node(ctx, "NodeStageVolume", n.limits.change, r.Secrets.Stage, func(ctx context.Context, c csi.NodeClient) error {
			_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId: r.Handle, StagingTargetPath: staging, VolumeCapability: capability,
				PublishContext: r.Attachment, VolumeContext: r.Attributes, Secrets: r.Secrets.Stage,
			})
			return err
		}); err != nil {
			return err
		}
	}
	n.step("publish")
	if err := n.publishTarget(ctx, d, r, rec); err != nil {
		return err
	}
	n.step("check")
	if err := checkPublished(target, r.Access); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
		defer cancel()
		return errdefs.New(errdefs.ClassOf(err), "%w", errors.Join(err, n.unpublishTarget(ctx, d, rec)))
	}
	return nil
}

// publishTarget makes the driver publish a volume that is staged, if it must be.
func (n *Node) publishTarget(ctx context.Context, d *driver, r *csinode.Request, rec record) error {
	return d.node(ctx, "NodePublishVolume", n.limits.change, joined(r.Secrets.Publish, r.Secrets.Context), func(ctx context.Context, c csi.NodeClient) error {
		_, err := c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: r.Handle, StagingTargetPath: n.stagingOf(rec), TargetPath: n.target(r.Key), VolumeCapability: d.capability(r), Readonly: r.ReadOnly,
			PublishContext: r.Attachment, VolumeContext: joined(r.Attributes, r.Secrets.Context), Secrets: r.Secrets.Publish,
		})
		return err
	})
}

// again makes the driver publish a volume again that is published, so that it can renew what is in it. If that fails, the volume stays as
// it is.
func (n *Node) again(ctx context.Context, r *csinode.Request, rec record) error {
	d, err := n.registry.driver(r.Driver)
	if err != nil {
		return err
	}
	return n.publishTarget(ctx, d, r, rec)
}

// joined returns the entries of both maps.
func joined(a, b map[string]string) map[string]string {
	if len(b) == 0 {
		return a
	}
	all := maps.Clone(b)
	maps.Copy(all, a)
	return all
}

// isStaged reports whether one of the publications of a volume had it staged since the machine started.
func (n *Node) isStaged(of []entry) bool {
	for _, e := range of {
		if e.bad == nil && e.rec.Staged && e.rec.Boot == n.boot {
			return true
		}
	}
	return false
}

// makeParents makes the folders in which, or at which, a driver mounts. "" is none.
func (n *Node) makeParents(dirs ...string) error {
	n.mu.Lock() // removeFolders must not remove one between two steps
	defer n.mu.Unlock()
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		rel, err := filepath.Rel(n.dir, dir)
		if err != nil {
			return err
		}
		at := n.dir
		for part := range strings.SplitSeq(rel, "/") {
			at = filepath.Join(at, part)
			if err := os.Mkdir(at, 0o700); err == nil {
				err = os.Chmod(at, 0o700) // independent of the umask
				if err != nil {
					return err
				}
			} else if !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make a folder for a CSI volume: %w", err)
			}
		}
	}
	return nil
}

// Unpublish undoes a publication: it makes the driver unpublish the volume, and unstage it if no other holder has it. It returns nil if
// there is no such publication. It finishes what an interrupted call has left, and can be repeated after any error.
//
// Errors: Unavailable if the driver is not registered or asks for another attempt; FailedPrecondition if something is left where the
// volume was; DataLoss if the record is damaged; the classes of the driver.
func (n *Node) Unpublish(ctx context.Context, k csinode.Key) error {
	if err := n.unpublish(ctx, k); err != nil {
		return fmt.Errorf("unpublish %s: %w", k, err)
	}
	return nil
}

var errNone = errors.New("no such publication")

func (n *Node) unpublish(ctx context.Context, k csinode.Key) error {
	e, unlock, err := n.hold(ctx, k)
	if errors.Is(err, errNone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := n.withdraw(ctx, e); err != nil {
		return err
	}
	n.step("forget")
	if err := n.forget(e.rec); err != nil {
		return err
	}
	n.step("unpublished")
	n.log.Info("CSI volume unpublished", "driver", e.rec.Driver, "volume", k.String())
	return nil
}

// hold waits for the locks of a publication and of its volume. Errors: errNone, DataLoss if the record is damaged.
func (n *Node) hold(ctx context.Context, k csinode.Key) (e entry, unlock func(), err error) {
	unlock, err = n.lockBoth(ctx, k, func() (string, error) {
		var found bool
		var err error
		if e, found, err = n.entry(k); err == nil && !found {
			err = errNone
		}
		return e.volume, err
	})
	return e, unlock, err
}

// withdraw makes the driver unpublish the volume of e, and unstage it if no other holder needs that, and removes the empty folders. The
// record stays. Preconditions: the locks of the publication are held.
func (n *Node) withdraw(ctx context.Context, e entry) error {
	if e.rec.Released {
		return nil
	}
	d, err := n.registry.driver(e.rec.Driver)
	if err != nil {
		return err
	}
	if e.rec.Boot != "" {
		e.rec.Boot = "" // so that nobody takes what is half undone for published
		n.step("undo")
		if err := n.save(e.rec); err != nil {
			return err
		}
	}
	n.step("unpublish")
	if err := n.unpublishTarget(ctx, d, e.rec); err != nil {
		return err
	}
	if staging := n.stagingOf(e.rec); staging != "" && !inUse(n.others(e.volume, e.rec.Key)) {
		if err := n.unstage(ctx, d, e.rec, staging); err != nil {
			return err
		}
	}
	n.step("folders of the target")
	return n.removeFolders(filepath.Dir(n.target(e.rec.Key)), n.Root())
}

// inUse reports whether one of the publications of a volume may need its staging.
func inUse(of []entry) bool {
	for _, e := range of {
		if e.bad != nil || e.rec.Staged {
			return true
		}
	}
	return false
}

func (n *Node) unpublishTarget(ctx context.Context, d *driver, r record) error {
	target := n.target(r.Key)
	if err := d.node(ctx, "NodeUnpublishVolume", n.limits.change, nil, func(ctx context.Context, c csi.NodeClient) error {
		_, err := c.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: r.Handle, TargetPath: target})
		return err
	}); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	n.step("remove the target")
	return remove(target, r.Driver)
}

func (n *Node) unstage(ctx context.Context, d *driver, r record, staging string) error {
	n.step("unstage")
	if d.can[csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME] {
		if err := d.node(ctx, "NodeUnstageVolume", n.limits.change, nil, func(ctx context.Context, c csi.NodeClient) error {
			_, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: r.Handle, StagingTargetPath: staging})
			return err
		}); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	n.step("remove the staging")
	if err := remove(staging, r.Driver); err != nil {
		return err
	}
	return n.removeFolders(filepath.Dir(staging), n.below(stagedName))
}

// remove removes an empty folder, or a file, where a driver had mounted a volume. It never removes what is in a folder: that may be the
// content of a volume. Errors: FailedPrecondition if there is something in it, or still mounted there.
func remove(path, driver string) error {
	err := os.Remove(path)
	switch {
	case err == nil || errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.EBUSY):
		return errdefs.Preconditionf("CSI driver %s says that the volume is released, but it is still mounted at %s; unmount it there", driver, path)
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return errdefs.Preconditionf("CSI driver %s says that the volume is released, but %s is not empty; look at what is there, and move it away", driver, path)
	}
	return fmt.Errorf("remove what is left of a volume that is released: %w", err)
}

// removeFolders removes dir, which must be empty, and those above it up to root that are empty then.
func (n *Node) removeFolders(dir, root string) error {
	n.mu.Lock() // see makeParents
	defer n.mu.Unlock()
	for at := dir; at != root && at != "/"; at = filepath.Dir(at) {
		err := os.Remove(at)
		switch {
		case err == nil || errors.Is(err, fs.ErrNotExist):
		case at != dir && (errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST)):
			return nil // other volumes
		default:
			return errdefs.Preconditionf("remove the empty folder of a volume; look at what is there: %w", err)
		}
	}
	return nil
}
