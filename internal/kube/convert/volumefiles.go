package convert

import (
	"cmp"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	labelset "k8s.io/apimachinery/pkg/labels"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Source reads the content of volumes.
type Source interface {
	Resolver
	// Token returns a token of pod's service account that is bound to the pod, for the audience ("" is the API server). The
	// token is valid for about that many seconds.
	Token(ctx context.Context, pod *corev1.Pod, audience string, seconds int64) (string, error)
	// Certificate returns a private key and its certificates, as PEM, for a source of a volume of pod.
	Certificate(ctx context.Context, pod *corev1.Pod, node Node, volume string, source int, p *corev1.PodCertificateProjection) (key, chain []byte, err error)
	// TrustBundle returns the ClusterTrustBundle called name.
	TrustBundle(ctx context.Context, name string) (*certv1.ClusterTrustBundle, error)
	// TrustBundles returns the ClusterTrustBundles of a signer whose labels match.
	TrustBundles(ctx context.Context, signer string, match labelset.Selector) ([]certv1.ClusterTrustBundle, error)
	// Disk returns the disk, or the folder of the node or of a server, of volume v of pod: that of a PersistentVolumeClaim of pod's namespace, which must
	// have been made for pod if v is ephemeral, or one that a CSI driver makes for pod.
	// Errors: FailedPrecondition while pod cannot use it, or if there is no such claim.
	Disk(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) (Disk, error)
}

// Disk is the disk or folder of a PersistentVolumeClaim, or of a CSI driver.
type Disk struct {
	ID       string // in the volume store of the node
	Device   bool   // containers use it as a device; else they mount its file system
	FSType   string // "": the default
	ReadOnly bool   // nobody may write to it

	Dir   *vm.HostDir // a folder of the node instead of a disk; nil: none
	NFS   *vm.NFS     // a folder of a server instead of a disk; nil: none
	Group bool        // of a folder of the node: its files are given to the group of the pod
}

// Object names what a volume uses: a ConfigMap or Secret of the pod's namespace, a ClusterTrustBundle, or all
// ClusterTrustBundles of a signer.
type Object struct {
	Kind ObjectKind
	Name string // or the signer's
}

// ObjectKind is the kind of an Object.
type ObjectKind string

// The kinds of objects.
const (
	KindConfigMap ObjectKind = "ConfigMap"
	KindSecret    ObjectKind = "Secret"

	KindTrustBundle         ObjectKind = "ClusterTrustBundle"
	KindSignersTrustBundles ObjectKind = "ClusterTrustBundles of signer"
)

// Default modes and lifetime, as set by the API server.
const (
	defaultMode  = 0o644
	tokenMode    = 0o600
	tokenSeconds = 3600
)

// Live returns the names of the volumes whose content may change while pod runs, and the objects that these volumes use.
func Live(pod *corev1.Pod) (names []string, objects []Object) {
	for _, def := range volumes(pod) {
		if def.Kind != vm.VolumeFiles || def.Label != "" {
			continue
		}
		names = append(names, def.Name)
		for _, s := range partsOf(pod, def.Name) {
			switch {
			case s.ConfigMap != nil:
				objects = append(objects, Object{KindConfigMap, s.ConfigMap.Name})
			case s.Secret != nil:
				objects = append(objects, Object{KindSecret, s.Secret.Name})
			case s.ClusterTrustBundle != nil && s.ClusterTrustBundle.Name != nil:
				objects = append(objects, Object{KindTrustBundle, *s.ClusterTrustBundle.Name})
			case s.ClusterTrustBundle != nil && s.ClusterTrustBundle.SignerName != nil:
				objects = append(objects, Object{KindSignersTrustBundles, *s.ClusterTrustBundle.SignerName})
			}
		}
	}
	return names, slices.Compact(slices.SortedFunc(slices.Values(objects), func(a, b Object) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	}))
}

// Fill reads the content of all volumes of pod concurrently, and finds the disks of its claims. If an object that is not optional is missing, the error is
// FailedPrecondition and names the volume, and the pod waits for the object. Other errors are the Source's.
func Fill(ctx context.Context, pod *corev1.Pod, node Node, from Source, volumes []vm.Volume) error {
	errs := make([]error, len(volumes))
	var wg sync.WaitGroup
	for i := range volumes {
		switch volumes[i].Kind {
		case vm.VolumeFiles:
			wg.Go(func() { volumes[i].Files, errs[i] = Files(ctx, pod, node, from, volumes[i].Name) })
		case vm.VolumeDisk:
			wg.Go(func() { errs[i] = findDisk(ctx, pod, from, &volumes[i]) })
		case vm.VolumeEmpty, vm.VolumeImage, vm.VolumeDir, vm.VolumeNFS, vm.VolumeHostDisk: // the guest makes the first and mounts the last, and the engine finds the others
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// findDisk replaces the name of v's claim or driver by the disk or the folder that the volume has.
func findDisk(ctx context.Context, pod *corev1.Pod, from Source, v *vm.Volume) error {
	at := slices.IndexFunc(pod.Spec.Volumes, func(p corev1.Volume) bool { return p.Name == v.Name })
	d, err := from.Disk(ctx, pod, &pod.Spec.Volumes[at])
	if err == nil {
		err = d.fits(pod, v.Name, v.Disk.Ref)
	}
	if err != nil {
		return fmt.Errorf("MountVolume.SetUp failed for volume %q: %w", v.Name, err)
	}
	if d.NFS != nil {
		folder := *d.NFS
		folder.ReadOnly = folder.ReadOnly || v.Disk.ReadOnly || d.ReadOnly || onlyRead(pod, v.Name)
		v.Kind, v.Disk, v.NFS, v.Group = vm.VolumeNFS, nil, &folder, nil
		return nil
	}
	if d.Dir != nil {
		dir := *d.Dir
		dir.ReadOnly = dir.ReadOnly || v.Disk.ReadOnly || d.ReadOnly || onlyRead(pod, v.Name)
		dir.GroupOnMismatch = v.Disk.GroupOnMismatch && d.Group
		v.Kind, v.Disk, v.Dir = vm.VolumeDir, nil, &dir
		if !d.Group {
			v.Group = nil
		}
		return nil
	}
	v.Disk.Ref, v.Disk.FSType, v.Disk.ReadOnly = d.ID, d.FSType, v.Disk.ReadOnly || d.ReadOnly
	if d.Device || IsInstance(pod) {
		v.Group, v.Disk.FSType = nil, ""
	}
	return nil
}

// fits returns a FailedPrecondition error unless the containers of pod use volume in the mode that its claim has.
func (d Disk) fits(pod *corev1.Pod, volume, claim string) error {
	for _, c := range containers(pod) {
		device := slices.ContainsFunc(c.VolumeDevices, func(d corev1.VolumeDevice) bool { return d.Name == volume })
		mounted := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume })
		switch {
		case d.Device && mounted:
			return errdefs.Preconditionf("persistentvolumeclaim %q has volumeMode Block; container %s needs it in volumeDevices instead of volumeMounts", claim, c.Name)
		case !d.Device && device && d.isDisk() && IsInstance(pod):
			// KubeVirt keeps a disk in a file of such a claim. Here the claim is that disk.
		case !d.Device && device && IsInstance(pod):
			return errdefs.Preconditionf("persistentvolumeclaim %q has volumeMode Filesystem, and its storage class gives a folder, which cannot be the disk of a VirtualMachineInstance; use a class of driver %s, or volumeMode Block", claim, contract.VolumeDriver)
		case !d.Device && device:
			return errdefs.Preconditionf("persistentvolumeclaim %q has volumeMode Filesystem; container %s needs it in volumeMounts instead of volumeDevices", claim, c.Name)
		}
	}
	return nil
}

// isDisk reports whether d is a disk, and not a folder.
func (d Disk) isDisk() bool { return d.Dir == nil && d.NFS == nil }

// IsInstance reports whether pod is the VM of a VirtualMachineInstance. Its volumes are disks in either volumeMode, as KubeVirt's are.
func IsInstance(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "VirtualMachineInstance" && strings.HasPrefix(owner.APIVersion, "kubevirt.io/")
}

// Files returns the content of pod's volume called name. Errors: those of Fill.
func Files(ctx context.Context, pod *corev1.Pod, node Node, from Source, name string) ([]vm.VolumeFile, error) {
	f := &filler{pod: pod, node: node, from: from}
	all := partsOf(pod, name)
	parts := make([][]vm.VolumeFile, len(all))
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { parts[i], errs[i] = f.read(ctx, all[i], name, i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("MountVolume.SetUp failed for volume %q: %w", name, err)
	}
	files := map[string]vm.VolumeFile{}
	for _, part := range parts {
		for _, file := range part {
			files[file.Path] = file // a later source wins, as with the kubelet
		}
	}
	out := make([]vm.VolumeFile, 0, len(files))
	for _, p := range slices.Sorted(maps.Keys(files)) {
		out = append(out, files[p])
	}
	return out, nil
}

// part is one source of a volume. A projected volume may have several sources, any other volume has one.
type part struct {
	corev1.VolumeProjection
	mode int32
}

// partsOf returns the sources of pod's volume called name.
func partsOf(pod *corev1.Pod, name string) []part {
	i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	one := func(p corev1.VolumeProjection, mode *int32) []part { return []part{{p, or(mode, defaultMode)}} }
	switch v := pod.Spec.Volumes[i]; {
	case v.ConfigMap != nil:
		return one(corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: v.ConfigMap.LocalObjectReference, Items: v.ConfigMap.Items, Optional: v.ConfigMap.Optional,
		}}, v.ConfigMap.DefaultMode)
	case v.Secret != nil:
		return one(corev1.VolumeProjection{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: v.Secret.SecretName}, Items: v.Secret.Items, Optional: v.Secret.Optional,
		}}, v.Secret.DefaultMode)
	case v.DownwardAPI != nil:
		return one(corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: v.DownwardAPI.Items}}, v.DownwardAPI.DefaultMode)
	case v.Projected != nil:
		var out []part
		for _, p := range v.Projected.Sources {
			out = append(out, part{p, or(v.Projected.DefaultMode, defaultMode)})
		}
		return out
	}
	return nil
}

// or returns *p, or otherwise if p is nil.
func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

type filler struct {
	pod  *corev1.Pod
	node Node
	from Source
}

// read reads one source of a volume.
func (f *filler) read(ctx context.Context, s part, volume string, index int) ([]vm.VolumeFile, error) {
	switch {
	case s.ConfigMap != nil:
		cm, err := f.from.ConfigMap(ctx, f.pod.Namespace, s.ConfigMap.Name)
		if err != nil {
			return nil, missing(err, "configmap", s.ConfigMap.Name, s.ConfigMap.Optional)
		}
		data := make(map[string][]byte, len(cm.Data)+len(cm.BinaryData))
		for k, v := range cm.Data {
			data[k] = []byte(v)
		}
		maps.Copy(data, cm.BinaryData)
		return items(data, s.ConfigMap.Items, s.mode, "configmap "+s.ConfigMap.Name, yes(s.ConfigMap.Optional))
	case s.Secret != nil:
		secret, err := f.from.Secret(ctx, f.pod.Namespace, s.Secret.Name)
		if err != nil {
			return nil, missing(err, "secret", s.Secret.Name, s.Secret.Optional)
		}
		return items(secret.Data, s.Secret.Items, s.mode, "secret "+s.Secret.Name, yes(s.Secret.Optional))
	case s.DownwardAPI != nil:
		return f.downward(s.DownwardAPI.Items, s.mode)
	case s.ServiceAccountToken != nil:
		return f.token(ctx, s.ServiceAccountToken, s.mode)
	case s.ClusterTrustBundle != nil:
		return f.trust(ctx, s.ClusterTrustBundle, s.mode)
	case s.PodCertificate != nil:
		return f.certificate(ctx, s.PodCertificate, volume, index, s.mode)
	}
	return nil, errdefs.Preconditionf("this node does not support one of its sources")
}

// items selects keys of an object. Without a list, every key is a file.
func items(data map[string][]byte, list []corev1.KeyToPath, mode int32, what string, optional bool) ([]vm.VolumeFile, error) {
	var out []vm.VolumeFile
	if len(list) == 0 {
		for _, key := range slices.Sorted(maps.Keys(data)) {
			out = append(out, vm.VolumeFile{Path: key, Data: data[key], Mode: uint32(mode)})
		}
		return out, nil
	}
	for _, item := range list {
		value, ok := data[item.Key]
		switch {
		case ok:
			out = append(out, vm.VolumeFile{Path: item.Path, Data: value, Mode: uint32(or(item.Mode, mode))})
		case !optional:
			return nil, errdefs.Preconditionf("%s has no key %q", what, item.Key)
		}
	}
	return out, nil
}

func (f *filler) downward(list []corev1.DownwardAPIVolumeFile, mode int32) ([]vm.VolumeFile, error) {
	e := &environment{pod: f.pod, node: f.node}
	var out []vm.VolumeFile
	for _, item := range list {
		var value string
		var err error
		switch {
		case item.FieldRef != nil:
			value, err = e.field(item.FieldRef.FieldPath)
		case item.ResourceFieldRef != nil:
			value, err = e.resource(item.ResourceFieldRef)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, vm.VolumeFile{Path: item.Path, Data: []byte(value), Mode: uint32(or(item.Mode, mode))})
	}
	return out, nil
}

// token returns the file of a service account token.
func (f *filler) token(ctx context.Context, p *corev1.ServiceAccountTokenProjection, mode int32) ([]vm.VolumeFile, error) {
	token, err := f.from.Token(ctx, f.pod, p.Audience, or(p.ExpirationSeconds, tokenSeconds))
	if err != nil {
		return nil, fmt.Errorf("request a token of service account %s: %w", f.pod.Spec.ServiceAccountName, err)
	}
	return []vm.VolumeFile{f.owned(p.Path, []byte(token), mode)}, nil
}

// owned is a file that, as with the kubelet, only the containers' user may read, if that user is known.
func (f *filler) owned(path string, data []byte, mode int32) vm.VolumeFile {
	uid := commonUser(f.pod)
	if sc := f.pod.Spec.SecurityContext; uid != nil || sc != nil && sc.FSGroup != nil {
		mode = tokenMode
	}
	return vm.VolumeFile{Path: path, Data: data, Mode: uint32(mode), UID: uid}
}

// trust returns the file of the certificates of one ClusterTrustBundle, or of all those of a signer that match. If there is
// none and it is optional, the file is empty.
func (f *filler) trust(ctx context.Context, p *corev1.ClusterTrustBundleProjection, mode int32) ([]vm.VolumeFile, error) {
	var bundles []certv1.ClusterTrustBundle
	what := "clustertrustbundle " + or(p.Name, "of signer "+or(p.SignerName, ""))
	if p.Name != nil {
		bundle, err := f.from.TrustBundle(ctx, *p.Name)
		switch {
		case err == nil:
			bundles = append(bundles, *bundle)
		case !errdefs.IsNotFound(err):
			return nil, err
		}
	} else {
		match, err := metav1.LabelSelectorAsSelector(p.LabelSelector)
		if err != nil {
			return nil, errdefs.Preconditionf("%s: %w", what, err)
		}
		if bundles, err = f.from.TrustBundles(ctx, or(p.SignerName, ""), match); err != nil {
			return nil, err
		}
	}
	if len(bundles) == 0 && !yes(p.Optional) {
		return nil, errdefs.Preconditionf("%s not found", what)
	}
	return []vm.VolumeFile{f.owned(p.Path, anchors(bundles), mode)}, nil
}

// anchors are the certificates of bundles, each once, in an order that does not change while they are the same.
func anchors(bundles []certv1.ClusterTrustBundle) []byte {
	all := map[string]bool{}
	for _, b := range bundles {
		for rest := []byte(b.Spec.TrustBundle); ; {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			all[string(block.Bytes)] = true
		}
	}
	var out []byte
	for _, der := range slices.Sorted(maps.Keys(all)) {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(der)})...)
	}
	return out
}

// certificate returns the files of a private key and its certificates.
func (f *filler) certificate(ctx context.Context, p *corev1.PodCertificateProjection, volume string, index int, mode int32) ([]vm.VolumeFile, error) {
	key, chain, err := f.from.Certificate(ctx, f.pod, f.node, volume, index, p)
	if err != nil {
		return nil, err
	}
	var files []vm.VolumeFile
	for _, file := range []struct {
		path string
		data []byte
	}{{p.CredentialBundlePath, slices.Concat(key, chain)}, {p.KeyPath, key}, {p.CertificateChainPath, chain}} {
		if file.path != "" {
			files = append(files, f.owned(file.path, file.data, mode))
		}
	}
	return files, nil
}
