package csi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// Token returns a token of pod's service account for an audience, "" being the API server, and when it expires.
type Token func(ctx context.Context, pod *corev1.Pod, audience string, seconds int64) (token string, expires time.Time, err error)

// tokenSeconds is the lifetime of a token if a driver names none.
const tokenSeconds = 3600

// Access modes as in the CSI specification. A driver that does not tell the first two apart gets SINGLE_NODE_WRITER.
const (
	modeWriters   = "SINGLE_NODE_MULTI_WRITER"
	modeWriter    = "SINGLE_NODE_SINGLE_WRITER"
	modeReaders   = "MULTI_NODE_READER_ONLY"
	modeEverybody = "MULTI_NODE_MULTI_WRITER"
)

func ownerOf(pod *corev1.Pod) vm.Owner { return vm.Owner{Namespace: pod.Namespace} }

// Ask says how and why a volume is published.
type Ask struct {
	Token Token
	// Renew publishes a volume again that is published, if its driver wants that from time to time (requiresRepublish of its CSIDriver).
	Renew bool
}

// Persistent publishes pv, a volume of a CSI driver that pod's volume has, and returns it as the pod's VM has it.
// Errors: FailedPrecondition while the pod must wait, Unavailable if the driver does not answer.
func (p *Plugins) Persistent(ctx context.Context, pod *corev1.Pod, volume string, pv *corev1.PersistentVolume, readOnly bool, ask Ask) (convert.Disk, error) {
	src := pv.Spec.CSI
	driver, err := p.driver(ctx, src.Driver)
	if err != nil || ask.Renew && !republishes(driver) {
		return convert.Disk{}, err
	}
	r := csinode.Request{
		Key: csinode.Key{Owner: ownerOf(pod), Holder: string(pod.UID), Name: volume}, Driver: src.Driver, Handle: src.VolumeHandle,
		Access: csinode.AsFolder, Mode: modeOf(pv.Spec.AccessModes), FSType: src.FSType, MountFlags: pv.Spec.MountOptions, ReadOnly: src.ReadOnly || readOnly,
		Attributes: maps.Clone(src.VolumeAttributes),
	}
	if pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		r.Access, r.FSType, r.MountFlags = csinode.AsDevice, "", nil
	}
	p.using(r.Key, uniqueName(r.Driver, r.Handle))
	if driver.Spec.AttachRequired == nil || *driver.Spec.AttachRequired {
		if r.Attachment, err = p.attached(ctx, r.Driver, r.Handle); err != nil {
			return convert.Disk{}, err
		}
	}
	for _, s := range []struct {
		ref *corev1.SecretReference
		to  *map[string]string
	}{{src.NodeStageSecretRef, &r.Secrets.Stage}, {src.NodePublishSecretRef, &r.Secrets.Publish}} {
		if s.ref == nil {
			continue
		}
		if *s.to, err = p.secret(ctx, s.ref.Namespace, s.ref.Name); err != nil {
			return convert.Disk{}, err
		}
	}
	return p.publish(ctx, pod, driver, r, slices.Contains(pv.Spec.AccessModes, corev1.ReadWriteOnce), ask)
}

// Inline publishes volume v of pod, which its driver makes for the pod, and returns it as the pod's VM has it. Errors: as of Persistent.
func (p *Plugins) Inline(ctx context.Context, pod *corev1.Pod, v *corev1.Volume, ask Ask) (convert.Disk, error) {
	src := v.CSI
	driver, err := p.driver(ctx, src.Driver)
	if err != nil || ask.Renew && !republishes(driver) {
		return convert.Disk{}, err
	}
	if !slices.Contains(driver.Spec.VolumeLifecycleModes, storagev1.VolumeLifecycleEphemeral) {
		return convert.Disk{}, errdefs.Preconditionf("CSI driver %s makes no volumes for single pods (volumeLifecycleModes of its CSIDriver); use a PersistentVolumeClaim", src.Driver)
	}
	r := csinode.Request{
		Key:    csinode.Key{Owner: ownerOf(pod), Holder: string(pod.UID), Name: v.Name},
		Driver: src.Driver, Handle: fmt.Sprintf("csi-%x", sha256.Sum256([]byte(pod.Namespace+v.Name+string(pod.UID)))),
		Access: csinode.AsFolder, Mode: modeWriters, ReadOnly: src.ReadOnly != nil && *src.ReadOnly, Ephemeral: true, Attributes: maps.Clone(src.VolumeAttributes),
	}
	if src.FSType != nil {
		r.FSType = *src.FSType
	}
	if ref := src.NodePublishSecretRef; ref != nil {
		if r.Secrets.Publish, err = p.secret(ctx, pod.Namespace, ref.Name); err != nil {
			return convert.Disk{}, err
		}
	}
	return p.publish(ctx, pod, driver, r, true, ask)
}

// publish publishes r. once says that the volume has the access mode ReadWriteOnce.
func (p *Plugins) publish(ctx context.Context, pod *corev1.Pod, driver *storagev1.CSIDriver, r csinode.Request, once bool, ask Ask) (convert.Disk, error) {
	r.Again = ask.Renew
	if err := p.tell(ctx, pod, driver, &r, ask.Token); err != nil {
		return convert.Disk{}, err
	}
	group := r.Access == csinode.AsFolder && grouped(driver, r.FSType != "" && once)
	if sc := pod.Spec.SecurityContext; group && sc != nil && sc.FSGroup != nil {
		r.Group = strconv.FormatInt(*sc.FSGroup, 10)
	}
	got, err := p.Node.PublishVolume(ctx, r)
	if err != nil {
		return convert.Disk{}, err
	}
	if r.Access == csinode.AsDevice {
		return convert.Disk{ID: string(got.Volume), Device: true, ReadOnly: r.ReadOnly}, nil
	}
	return convert.Disk{Dir: &vm.HostDir{Path: got.Path, Published: true}, ReadOnly: r.ReadOnly, Group: group && !got.Grouped}, nil
}

// republishes reports whether a driver wants to publish volumes again from time to time.
func republishes(driver *storagev1.CSIDriver) bool {
	return driver.Spec.RequiresRepublish != nil && *driver.Spec.RequiresRepublish
}

// grouped reports whether the files of a driver's volume are given to the group of the pod. formatted says that the volume has a file
// system of its own for one node.
func grouped(driver *storagev1.CSIDriver, formatted bool) bool {
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if driver.Spec.FSGroupPolicy != nil {
		policy = *driver.Spec.FSGroupPolicy
	}
	switch policy {
	case storagev1.FileFSGroupPolicy:
		return true
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy:
	}
	return formatted
}

// driver returns the CSIDriver object, or the defaults for a driver that has none.
func (p *Plugins) driver(ctx context.Context, name string) (*storagev1.CSIDriver, error) {
	d, err := p.Client.StorageV1().CSIDrivers().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
	case err != nil:
		return nil, errdefs.Unavailablef("read CSIDriver %s: %w", name, err)
	}
	return d, nil
}

// secret returns the data of a Secret that a driver needs.
func (p *Plugins) secret(ctx context.Context, namespace, name string) (map[string]string, error) {
	s, err := p.Client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, errdefs.Preconditionf("secret %s/%s, which the CSI driver needs, not found", namespace, name)
	case err != nil:
		return nil, errdefs.Unavailablef("read secret %s/%s for the CSI driver: %w", namespace, name, err)
	}
	out := make(map[string]string, len(s.Data))
	for k, v := range s.Data {
		out[k] = string(v)
	}
	return out, nil
}

// Keys of the attributes by which a driver learns for which pod it publishes, as the kubelet sets them.
const (
	attributePod       = "csi.storage.k8s.io/pod.name"
	attributeNamespace = "csi.storage.k8s.io/pod.namespace"
	attributeUID       = "csi.storage.k8s.io/pod.uid"
	attributeAccount   = "csi.storage.k8s.io/serviceAccount.name"
	attributeEphemeral = "csi.storage.k8s.io/ephemeral"
	attributeTokens    = "csi.storage.k8s.io/serviceAccount.tokens"
)

// tell adds to r what the driver wants to know about pod.
func (p *Plugins) tell(ctx context.Context, pod *corev1.Pod, driver *storagev1.CSIDriver, r *csinode.Request, token Token) error {
	set := func(key, value string) {
		if r.Attributes == nil {
			r.Attributes = map[string]string{}
		}
		r.Attributes[key] = value
	}
	if info := driver.Spec.PodInfoOnMount; info != nil && *info {
		set(attributePod, pod.Name)
		set(attributeNamespace, pod.Namespace)
		set(attributeUID, string(pod.UID))
		set(attributeAccount, pod.Spec.ServiceAccountName)
		set(attributeEphemeral, strconv.FormatBool(r.Ephemeral))
	}
	if len(driver.Spec.TokenRequests) == 0 {
		return nil
	}
	type granted struct {
		Token   string    `json:"token"`
		Expires time.Time `json:"expirationTimestamp"`
	}
	all := map[string]granted{}
	for _, t := range driver.Spec.TokenRequests {
		seconds := int64(tokenSeconds)
		if t.ExpirationSeconds != nil {
			seconds = *t.ExpirationSeconds
		}
		value, expires, err := token(ctx, pod, t.Audience, seconds)
		if err != nil {
			return fmt.Errorf("request a token of service account %s for CSI driver %s: %w", pod.Spec.ServiceAccountName, r.Driver, err)
		}
		all[t.Audience] = granted{value, expires}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("encode the tokens for CSI driver %s: %w", r.Driver, err)
	}
	to := &r.Secrets.Context // not among the attributes, which are no secret
	if in := driver.Spec.ServiceAccountTokenInSecrets; in != nil && *in {
		to = &r.Secrets.Publish
	}
	if *to == nil {
		*to = map[string]string{}
	}
	(*to)[attributeTokens] = string(text)
	return nil
}

// modeOf returns the access mode of a volume, by its first one as in the kubelet.
func modeOf(modes []corev1.PersistentVolumeAccessMode) string {
	if len(modes) == 0 {
		return modeWriters
	}
	switch modes[0] {
	case corev1.ReadWriteMany:
		return modeEverybody
	case corev1.ReadOnlyMany:
		return modeReaders
	case corev1.ReadWriteOncePod:
		return modeWriter
	case corev1.ReadWriteOnce:
	}
	return modeWriters
}
