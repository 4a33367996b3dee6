package kubevirt

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"cocoonstack.io/cocoon/api/contract"
)

// DataVolumeKind is the kind of a DataVolume.
var DataVolumeKind = v1beta1.SchemeGroupVersion.WithKind("DataVolume")

// LabelClaim is a label of the claims of DataVolumes, with the value of CDI.
const (
	LabelClaim      = "app.kubernetes.io/managed-by"
	LabelClaimValue = "cdi-controller"
)

// ImmediateBinding is the annotation of CDI by which the volume is made before it has a pod.
const ImmediateBinding = "cdi.kubevirt.io/storage.bind.immediate.requested"

const snapshotGroup = "snapshot.storage.k8s.io"

// CheckDataVolume returns an error for each setting that Cocoon refuses. at is the path of the spec in its object, and namespace that of the object.
func CheckDataVolume(s *v1beta1.DataVolumeSpec, namespace string, at *field.Path) field.ErrorList {
	c := dataVolume{s: s, namespace: namespace, at: at}
	c.no(s.SourceRef != nil, "sourceRef", "Cocoon has no DataSources; use source")
	c.no(s.ContentType != "" && s.ContentType != v1beta1.DataVolumeKubeVirt, "contentType", "only the disk of a machine is imported; use kubevirt")
	c.no(len(s.Checkpoints) > 0, "checkpoints", "a disk is imported in one step")
	c.no(s.FinalCheckpoint, "finalCheckpoint", "a disk is imported in one step")
	c.no(s.Preallocation != nil && *s.Preallocation, "preallocation", "volumes take space as they are filled")
	c.no(s.PriorityClassName != "", "priorityClassName", "no pod imports a disk")
	c.claim()
	if s.SourceRef == nil {
		c.source()
	}
	return c.errs
}

type dataVolume struct {
	s         *v1beta1.DataVolumeSpec
	namespace string
	at        *field.Path
	errs      field.ErrorList
}

// no refuses a field when it is set.
func (c *dataVolume) no(when bool, path, why string) {
	if when {
		at := c.at
		for name := range strings.SplitSeq(path, ".") {
			at = at.Child(name)
		}
		c.errs = append(c.errs, field.Forbidden(at, why))
	}
}

func (c *dataVolume) require(missing bool, names ...string) {
	if missing {
		c.errs = append(c.errs, field.Required(c.at.Child(names[0], names[1:]...), ""))
	}
}

// claim checks what the claim is to be.
func (c *dataVolume) claim() {
	pvc, storage := c.s.PVC, c.s.Storage
	switch {
	case pvc != nil && storage != nil:
		c.no(true, "storage", "use either pvc or storage")
		return
	case pvc == nil && storage == nil:
		c.errs = append(c.errs, field.Required(c.at.Child("storage"), "say how large the volume is"))
		return
	}
	form := "storage"
	if pvc != nil {
		form = "pvc"
	}
	spec := claimSpec(c.s)
	c.no(spec.DataSource != nil, form+".dataSource", "source says what is on the volume")
	c.no(spec.DataSourceRef != nil, form+".dataSourceRef", "source says what is on the volume")
	c.no(spec.VolumeName != "", form+".volumeName", "the volume is made for the claim")
	c.no(spec.Selector != nil, form+".selector", "the volume is made for the claim")
	size := spec.Resources.Requests[corev1.ResourceStorage]
	c.require(size.Sign() <= 0 && (c.s.Source == nil || c.s.Source.PVC == nil || pvc != nil), form, "resources", "requests", "storage")
}

// source checks what is to be on the volume.
func (c *dataVolume) source() {
	s := c.s.Source
	if s == nil {
		c.errs = append(c.errs, field.Required(c.at.Child("source"), "say what is on the volume, or blank"))
		return
	}
	n := 0
	for _, one := range []bool{s.HTTP != nil, s.S3 != nil, s.GCS != nil, s.Registry != nil, s.PVC != nil, s.Upload != nil, s.Blank != nil, s.Imageio != nil, s.VDDK != nil, s.Snapshot != nil} {
		if one {
			n++
		}
	}
	if n != 1 {
		c.errs = append(c.errs, field.Invalid(c.at.Child("source"), n, "must have exactly one source"))
		return
	}
	const other = "sources are registry, http, upload, pvc, snapshot and blank"
	c.no(s.S3 != nil, "source.s3", other+"; an S3 server has a URL for http")
	c.no(s.GCS != nil, "source.gcs", other+"; the storage has a URL for http")
	c.no(s.Imageio != nil, "source.imageio", other)
	c.no(s.VDDK != nil, "source.vddk", other)
	switch {
	case s.HTTP != nil:
		c.http(s.HTTP)
	case s.Registry != nil:
		c.registry(s.Registry)
	case s.PVC != nil:
		c.copied("source.pvc", s.PVC.Namespace, s.PVC.Name)
	case s.Snapshot != nil:
		c.copied("source.snapshot", s.Snapshot.Namespace, s.Snapshot.Name)
	}
}

// Why a disk cannot be fetched with the secrets of a DataVolume.
const (
	noSecret = "the node that imports the disk may read only Secrets of its pods; use a disk that needs no credentials" //nolint:gosec // a sentence
	noCA     = "the node that imports the disk trusts the certificates of its own configuration (images.registries); ask its operator"
	noHeader = "no header is added to a request"
)

func (c *dataVolume) http(s *v1beta1.DataVolumeSourceHTTP) {
	if u, err := url.Parse(s.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		c.errs = append(c.errs, field.Invalid(c.at.Child("source", "http", "url"), s.URL, "must be http://… or https://…"))
	} else if u.User != nil {
		c.no(true, "source.http.url", "whoever may read claims would read the password in it")
	}
	c.no(s.SecretRef != "", "source.http.secretRef", noSecret)
	c.no(s.CertConfigMap != "", "source.http.certConfigMap", noCA)
	c.no(len(s.ExtraHeaders) > 0, "source.http.extraHeaders", noHeader)
	c.no(len(s.SecretExtraHeaders) > 0, "source.http.secretExtraHeaders", noHeader)
}

func (c *dataVolume) registry(s *v1beta1.DataVolumeSourceRegistry) {
	name := ""
	if s.URL != nil {
		name = *s.URL
	}
	image, ok := strings.CutPrefix(name, "docker://")
	if !ok || image == "" {
		c.errs = append(c.errs, field.Invalid(c.at.Child("source", "registry", "url"), name, "must be docker://IMAGE"))
	}
	c.no(s.ImageStream != nil, "source.registry.imageStream", "use url")
	c.no(s.SecretRef != nil && *s.SecretRef != "", "source.registry.secretRef", noSecret)
	c.no(s.CertConfigMap != nil && *s.CertConfigMap != "", "source.registry.certConfigMap", noCA)
	if p := s.Platform; p != nil && p.Architecture != "" && p.Architecture != architecture {
		c.errs = append(c.errs, field.NotSupported(c.at.Child("source", "registry", "platform", "architecture"), p.Architecture, []string{architecture}))
	}
}

// copied checks the source of a copy, which is in the namespace of the DataVolume.
func (c *dataVolume) copied(path, namespace, name string) {
	kind := strings.TrimPrefix(path, "source.")
	c.require(name == "", "source", kind, "name")
	c.no(namespace != "" && c.namespace != "" && namespace != c.namespace, path+".namespace", "volumes are copied within their namespace only")
}

// claimSpec returns the specification of the claim, as the DataVolume has it.
func claimSpec(s *v1beta1.DataVolumeSpec) corev1.PersistentVolumeClaimSpec {
	if s.PVC != nil {
		return *s.PVC.DeepCopy()
	}
	t := s.Storage.DeepCopy()
	return corev1.PersistentVolumeClaimSpec{
		AccessModes: t.AccessModes, Selector: t.Selector, Resources: t.Resources, VolumeName: t.VolumeName, StorageClassName: t.StorageClassName,
		VolumeMode: t.VolumeMode, DataSource: t.DataSource, DataSourceRef: t.DataSourceRef,
	}
}

// Imported returns the image whose disk is to be on the volume of dv; "": it gets none.
func Imported(s *v1beta1.DataVolumeSpec) string {
	switch src := s.Source; {
	case src == nil:
	case src.HTTP != nil:
		return src.HTTP.URL
	case src.Registry != nil && src.Registry.URL != nil:
		return *src.Registry.URL
	}
	return ""
}

// Copied reports whether the volume is a copy of another one.
func Copied(s *v1beta1.DataVolumeSpec) bool {
	return s.Source != nil && (s.Source.PVC != nil || s.Source.Snapshot != nil)
}

// Uploaded reports whether the content of the volume is uploaded.
func Uploaded(s *v1beta1.DataVolumeSpec) bool { return s.Source != nil && s.Source.Upload != nil }

// Claim returns the claim of dv. A claim of the form storage is a block device with one writer unless it says otherwise.
// Preconditions: CheckDataVolume returns no error.
func Claim(dv *v1beta1.DataVolume) *corev1.PersistentVolumeClaim {
	spec := claimSpec(&dv.Spec)
	if len(spec.AccessModes) == 0 {
		spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	}
	if m := spec.VolumeMode; m == nil && dv.Spec.Storage != nil || m != nil && *m == v1beta1.PersistentVolumeFromStorageProfile {
		block := corev1.PersistentVolumeBlock
		spec.VolumeMode = &block
	}
	switch src := dv.Spec.Source; {
	case src.PVC != nil:
		spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: src.PVC.Name}
	case src.Snapshot != nil:
		group := snapshotGroup
		spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: src.Snapshot.Name}
	}
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: dv.Name, Namespace: dv.Namespace, Labels: maps.Clone(dv.Labels), Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(dv, DataVolumeKind)},
		},
		Spec: spec,
	}
	if claim.Labels == nil {
		claim.Labels = map[string]string{}
	}
	claim.Labels[LabelClaim] = LabelClaimValue
	if image := Imported(&dv.Spec); image != "" {
		claim.Annotations[contract.KeyVolumeImage] = image
	}
	if Uploaded(&dv.Spec) {
		claim.Annotations[contract.KeyUploadTarget] = ""
	}
	return claim
}

// ClaimOf returns the name of the claim that a volume of a machine is; "": it is none. The claim of a DataVolume has its name.
func ClaimOf(v *v1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.DataVolume != nil:
		return v.DataVolume.Name
	}
	return ""
}

// CopiedClaim returns the name of the claim of which a volume of an instance is a copy that goes with the instance; "": it is none.
func CopiedClaim(v *v1.Volume) string {
	if v.Ephemeral == nil || v.Ephemeral.PersistentVolumeClaim == nil {
		return ""
	}
	return v.Ephemeral.PersistentVolumeClaim.ClaimName
}

// HasDataVolume reports whether a volume of spec is the DataVolume name.
func HasDataVolume(spec *v1.VirtualMachineInstanceSpec, name string) bool {
	return slices.ContainsFunc(spec.Volumes, func(v v1.Volume) bool { return v.DataVolume != nil && v.DataVolume.Name == name })
}

// Hotpluggable reports whether the volume, a claim or a DataVolume, was added to the machine or is to be removable.
func Hotpluggable(v *v1.Volume) bool {
	return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.Hotpluggable || v.DataVolume != nil && v.DataVolume.Hotpluggable
}

// checkTemplates checks the DataVolumes that a machine brings.
func checkTemplates(vm *v1.VirtualMachine, at *field.Path) (errs field.ErrorList) {
	seen := map[string]bool{}
	for i := range vm.Spec.DataVolumeTemplates {
		t, at := &vm.Spec.DataVolumeTemplates[i], at.Index(i)
		switch {
		case t.Name == "":
			errs = append(errs, field.Required(at.Child("metadata", "name"), ""))
		case seen[t.Name]:
			errs = append(errs, field.Duplicate(at.Child("metadata", "name"), t.Name))
		case t.Namespace != "" && vm.Namespace != "" && t.Namespace != vm.Namespace:
			errs = append(errs, field.Invalid(at.Child("metadata", "namespace"), t.Namespace, fmt.Sprintf("must be that of the machine, %s", vm.Namespace)))
		}
		seen[t.Name] = true
		errs = append(errs, CheckDataVolume(&t.Spec, vm.Namespace, at.Child("spec"))...)
	}
	return errs
}

// DataVolume returns the DataVolume that a template of vm describes. It goes with the machine.
func DataVolume(vm *v1.VirtualMachine, t *v1.DataVolumeTemplateSpec) *v1beta1.DataVolume {
	dv := &v1beta1.DataVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: t.Name, Namespace: vm.Namespace, Labels: maps.Clone(t.Labels), Annotations: maps.Clone(t.Annotations),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(vm, v1.VirtualMachineGroupVersionKind)},
		},
		Spec: *t.Spec.DeepCopy(),
	}
	if dv.Labels == nil {
		dv.Labels = map[string]string{}
	}
	dv.Labels[v1.CreatedByLabel] = string(vm.UID)
	return dv
}
