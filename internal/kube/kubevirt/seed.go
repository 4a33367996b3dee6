package kubevirt

import (
	"encoding/base64"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxInline is the size limit of an inline document of cloud-init in bytes. KubeVirt has the same.
const maxInline = 2048

// Keys of the documents in a Secret, as in KubeVirt.
const (
	userKey    = "userdata"
	networkKey = contract.NetworkDataKey
)

// document is a document of cloud-init. At most one of its fields is set. A Secret has user data at userKey, network data at networkKey.
type document struct {
	secret       *corev1.LocalObjectReference
	text, base64 string
}

func (d document) given() (n int) {
	for _, set := range []bool{d.secret != nil, d.text != "", d.base64 != ""} {
		if set {
			n++
		}
	}
	return n
}

// inline returns the document that is in the object itself.
func (d document) inline() (string, error) {
	if d.base64 == "" {
		return d.text, nil
	}
	text, err := base64.StdEncoding.DecodeString(d.base64)
	return string(text), err
}

// seed is what both kinds of cloud-init volumes have.
type seed struct {
	user, network document
	datasource    string
}

// cloudInit returns what v says about cloud-init, and the name of the field that says it; nil if it is another volume.
func cloudInit(v v1.Volume) (*seed, string) {
	switch n, d := v.CloudInitNoCloud, v.CloudInitConfigDrive; {
	case n != nil:
		return &seed{
			document{n.UserDataSecretRef, n.UserData, n.UserDataBase64},
			document{n.NetworkDataSecretRef, n.NetworkData, n.NetworkDataBase64},
			"nocloud",
		}, "cloudInitNoCloud"
	case d != nil:
		return &seed{
			document{d.UserDataSecretRef, d.UserData, d.UserDataBase64},
			document{d.NetworkDataSecretRef, d.NetworkData, d.NetworkDataBase64},
			"configdrive",
		}, "cloudInitConfigDrive"
	}
	return nil, ""
}

func (c *check) seed(s *seed, at *field.Path) {
	if s.user.given()+s.network.given() == 0 {
		c.errs = append(c.errs, field.Required(at, "give userData or networkData, as text, base64 or the reference of a Secret"))
	}
	c.document(s.user, at, "secretRef", "userData", nil)
	c.document(s.network, at, "networkDataSecretRef", "networkData", func(text string) error {
		return cloudinit.Validate(vm.CloudInit{Datasource: s.datasource, NetworkConfig: text})
	})
}

// document checks a document whose fields below at are called ref, name and nameBase64. No error quotes it: it may be secret.
func (c *check) document(d document, at *field.Path, ref, name string, valid func(string) error) {
	if d.given() > 1 {
		c.errs = append(c.errs, field.Forbidden(at, "only one of "+name+", "+name+"Base64 and "+ref+" can be given"))
		return
	}
	if d.secret != nil && d.secret.Name == "" {
		c.errs = append(c.errs, field.Required(at.Child(ref, "name"), ""))
	}
	text, err := d.inline()
	switch {
	case err != nil:
		c.errs = append(c.errs, field.Invalid(at.Child(name+"Base64"), field.OmitValueType{}, "is not base64"))
	case len(text) > maxInline:
		c.errs = append(c.errs, field.TooLong(at.Child(name), field.OmitValueType{}, maxInline))
	case text != "" && valid != nil:
		if err := valid(text); err != nil {
			c.errs = append(c.errs, field.Invalid(at.Child(name), field.OmitValueType{}, err.Error()))
		}
	}
}

// seedName returns the name of the Secret with the inline documents of vmi.
func seedName(vmi *v1.VirtualMachineInstance) string { return PodName(vmi) }

// Seed returns the Secret with the inline documents of vmi, nil if it has none. They may hold passwords, so they are in no annotation.
func Seed(vmi *v1.VirtualMachineInstance) *corev1.Secret {
	data := map[string][]byte{}
	for _, v := range vmi.Spec.Volumes {
		seed, _ := cloudInit(v)
		if seed == nil {
			continue
		}
		for key, d := range map[string]document{userKey: seed.user, networkKey: seed.network} {
			if text, _ := d.inline(); text != "" { // checked
				data[key] = []byte(text)
			}
		}
	}
	if len(data) == 0 {
		return nil
	}
	immutable := true
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name: seedName(vmi), Namespace: vmi.Namespace, Labels: map[string]string{v1.CreatedByLabel: string(vmi.UID)},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(vmi, kind)},
		},
		Immutable: &immutable,
		Data:      data,
	}
}

// apply makes the pod name the documents, those of the object itself in the Secret own, and the Secrets credentials with SSH keys. A volume of the pod, called volume, lets the node
// read the Secrets.
func (s *seed) apply(pod *corev1.Pod, volume, own string, credentials []string) {
	secrets := credentials
	source := func(d document, key string) string {
		name := own
		if d.secret != nil {
			name = d.secret.Name
		}
		if !slices.Contains(secrets, name) {
			secrets = append(secrets, name)
		}
		return contract.Source{Kind: contract.SourceSecret, Name: name, Key: key}.String()
	}
	annotations := pod.Annotations
	annotations[contract.KeyVirtletImageType] = s.datasource
	if s.user.given() > 0 {
		annotations[contract.KeyVirtletUserDataSource], annotations[contract.KeyVirtletUserDataKey] = source(s.user, ""), userKey
	}
	if s.network.given() > 0 {
		annotations[contract.KeyNetworkData] = source(s.network, networkKey)
	}
	if len(credentials) > 0 {
		annotations[contract.KeySSHSecrets] = strings.Join(credentials, ",")
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: volume, VolumeSource: corev1.VolumeSource{Projected: projected(secrets)}})
}
