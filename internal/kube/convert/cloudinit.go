package convert

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// defaultSSHKey is the key that is read if VirtletSSHKeySource names no key.
const defaultSSHKey = "authorized_keys"

// CloudInit returns the additions of the Virtlet annotations of pod to its guest's cloud-init. It returns nil without such
// annotations. A disk guest then gets only the generated documents. If a source is missing or has invalid content, the error
// is FailedPrecondition, and the pod waits until somebody fixes the source. Other errors are the Resolver's. No error quotes
// the content of a source.
//
// The user-data is the first of these that exists: the value of one key of the source; the script; the source's keys with the
// annotation's document merged over them, or with VirtletCloudInitUserDataOverwrite only that document.
func CloudInit(ctx context.Context, pod *corev1.Pod, from Resolver) (*vm.CloudInit, error) {
	ask, _ := contract.ParseVirtlet(pod.Annotations)
	machine, _ := contract.ParseMachine(pod.Annotations)
	if !ask.CloudInit() && machine.NetworkData == (contract.Source{}) && len(machine.SSHSecrets) == 0 {
		return nil, nil
	}
	s := sources{pod: pod, from: from}
	c := vm.CloudInit{Datasource: ask.ImageType, MetaData: ask.MetaData}
	var err error
	if c.NetworkConfig, err = s.network(ctx, ask.ForceDHCP, machine.NetworkData); err != nil {
		return nil, err
	}
	if c.UserData, err = s.userData(ctx, ask); err != nil {
		return nil, err
	}
	if c.SSHKeys, err = s.sshKeys(ctx, ask); err != nil {
		return nil, err
	}
	for _, name := range machine.SSHSecrets {
		data, err := s.read(ctx, contract.KeySSHSecrets, contract.Source{Kind: contract.SourceSecret, Name: name})
		if err != nil {
			return nil, err
		}
		for _, key := range slices.Sorted(maps.Keys(data)) {
			c.SSHKeys = append(c.SSHKeys, cloudinit.Keys(data[key])...)
		}
	}
	files, err := s.files(ctx, ask.Files)
	if err != nil {
		return nil, err
	}
	if c, err = cloudinit.WithFiles(c, files); err != nil {
		return nil, errdefs.As(errdefs.FailedPrecondition, err)
	}
	if err := cloudinit.Validate(c); err != nil {
		return nil, errdefs.As(errdefs.FailedPrecondition, err)
	}
	return &c, nil
}

// sources reads the ConfigMaps and Secrets that annotations name.
type sources struct {
	pod  *corev1.Pod
	from Resolver
}

// network returns the network configuration: that of src, which beats dhcp.
func (s sources) network(ctx context.Context, dhcp bool, src contract.Source) (string, error) {
	if src == (contract.Source{}) {
		if dhcp {
			return cloudinit.NetworkDHCP, nil
		}
		return "", nil
	}
	data, err := s.read(ctx, contract.KeyNetworkData, src)
	if err != nil {
		return "", err
	}
	return value(contract.KeyNetworkData, src, data, cmp.Or(src.Key, contract.NetworkDataKey))
}

func (s sources) userData(ctx context.Context, ask contract.Virtlet) (string, error) {
	data, err := s.read(ctx, contract.KeyVirtletUserDataSource, ask.UserDataSource)
	if err != nil {
		return "", err
	}
	if ask.UserDataKey != "" {
		doc, err := value(contract.KeyVirtletUserDataSource, ask.UserDataSource, data, ask.UserDataKey)
		if err == nil && ask.UserDataEncoding == contract.EncodingBase64 {
			doc, err = decode(contract.KeyVirtletUserDataSource, ask.UserDataSource, ask.UserDataKey, doc)
		}
		return expandMounts(doc), err
	}
	if ask.UserDataScript != "" {
		return expandMounts(ask.UserDataScript), nil
	}
	doc := ""
	if !ask.UserDataOverwrite {
		for _, key := range slices.Sorted(maps.Keys(data)) {
			if doc, err = cloudinit.SetKey(doc, key, data[key]); err != nil {
				return "", errdefs.Preconditionf("%s %s: key %s: %w", contract.KeyVirtletUserDataSource, ask.UserDataSource, key, err)
			}
		}
	}
	if doc == "" && ask.UserData == "" {
		return "", nil
	}
	doc, err = cloudinit.Merge(doc, ask.UserData)
	return doc, errdefs.As(errdefs.FailedPrecondition, err)
}

// expandMounts removes the mount script, because the files of a disk guest exist before a script runs.
func expandMounts(doc string) string { return strings.ReplaceAll(doc, contract.MountScript, "") }

func (s sources) sshKeys(ctx context.Context, ask contract.Virtlet) ([]string, error) {
	var keys []string
	src := ask.SSHKeySource
	if src != (contract.Source{}) && (!ask.UserDataOverwrite || ask.SSHKeys == "") {
		data, err := s.read(ctx, contract.KeyVirtletSSHKeySource, src)
		if err != nil {
			return nil, err
		}
		list, err := value(contract.KeyVirtletSSHKeySource, src, data, cmp.Or(src.Key, defaultSSHKey))
		if err != nil {
			return nil, err
		}
		keys = cloudinit.Keys(list)
	}
	return append(keys, cloudinit.Keys(ask.SSHKeys)...), nil
}

// files reads each key X with its keys X_path and X_encoding. The default encoding is base64.
func (s sources) files(ctx context.Context, src contract.Source) ([]cloudinit.File, error) {
	const what = contract.KeyVirtletFiles
	data, err := s.read(ctx, what, src)
	if err != nil {
		return nil, err
	}
	var files []cloudinit.File
	for _, key := range slices.Sorted(maps.Keys(data)) {
		if attribute(data, key, "_path") || attribute(data, key, "_encoding") {
			continue
		}
		path, err := value(what, src, data, key+"_path")
		if err != nil {
			return nil, err
		}
		content := data[key]
		switch data[key+"_encoding"] {
		case contract.EncodingPlain:
		case "", contract.EncodingBase64:
			if content, err = decode(what, src, key, content); err != nil {
				return nil, err
			}
		default:
			return nil, errdefs.Preconditionf("%s %s: key %s_encoding is neither base64 nor plain", what, src, key)
		}
		files = append(files, cloudinit.File{Path: strings.TrimSpace(path), Data: []byte(content)})
	}
	return files, nil
}

// attribute reports whether key, with that suffix, describes another key.
func attribute(data map[string]string, key, suffix string) bool {
	of, ok := strings.CutSuffix(key, suffix)
	if ok {
		_, ok = data[of]
	}
	return ok
}

// read returns the content of src, or nil without a source.
func (s sources) read(ctx context.Context, what string, src contract.Source) (map[string]string, error) {
	if src == (contract.Source{}) {
		return nil, nil
	}
	data := map[string]string{}
	var err error
	if src.Kind == contract.SourceSecret {
		var secret *corev1.Secret
		if secret, err = s.from.Secret(ctx, s.pod.Namespace, src.Name); err == nil {
			for k, v := range secret.Data {
				data[k] = string(v)
			}
		}
	} else {
		var cm *corev1.ConfigMap
		if cm, err = s.from.ConfigMap(ctx, s.pod.Namespace, src.Name); err == nil {
			for k, v := range cm.BinaryData {
				data[k] = string(v)
			}
			maps.Copy(data, cm.Data)
		}
	}
	if apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("%s: a node may read only what a volume of its pod names; add it to the pod as a volume (no container has to mount it): %w", what, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, missing(err, src.Kind, src.Name, nil))
	}
	return data, nil
}

func value(what string, src contract.Source, data map[string]string, key string) (string, error) {
	v, ok := data[key]
	if !ok {
		return "", errdefs.Preconditionf("%s %s: has no key %s", what, src, key)
	}
	return v, nil
}

func decode(what string, src contract.Source, key, text string) (string, error) {
	b, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil { // do not wrap err, because its text quotes the content
		return "", errdefs.Preconditionf("%s %s: key %s is not valid base64", what, src, key)
	}
	return string(b), nil
}

// checkVirtlet refuses annotations that can never work, without reading sources. Errors do not quote the documents, because
// they may be secret.
func checkVirtlet(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	ask, err := contract.ParseVirtlet(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	bad := func(key string, err error) {
		if err != nil {
			errs = append(errs, field.Invalid(annotationPath(key), field.OmitValueType{}, err.Error()))
		}
	}
	bad(contract.KeyVirtletMetaData, cloudinit.Validate(vm.CloudInit{MetaData: ask.MetaData}))
	_, err = cloudinit.Merge("", ask.UserData)
	bad(contract.KeyVirtletUserData, err)
	bad(contract.KeyVirtletUserDataScript, cloudinit.Validate(vm.CloudInit{UserData: ask.UserDataScript}))
	bad(contract.KeyVirtletSSHKeys, cloudinit.Validate(vm.CloudInit{SSHKeys: []string{ask.SSHKeys}}))
	return errs
}

// Ignored describes, for an Event, the Virtlet annotations that are valid but have no effect.
func Ignored(pod *corev1.Pod) []string {
	ask, _ := contract.ParseVirtlet(pod.Annotations)
	var out []string
	for _, a := range []struct {
		asked bool
		what  string
	}{
		{ask.DiskDriver == "scsi", contract.KeyVirtletDiskDriver + " scsi (disks are virtio)"},
		{ask.CPUModel != "", contract.KeyVirtletCPUModel},
		{ask.CPUSetting != "", contract.KeyVirtletCPUSetting},
		{ask.ChownMounts, contract.KeyVirtletChownMounts},
	} {
		if a.asked {
			out = append(out, a.what)
		}
	}
	return out
}
