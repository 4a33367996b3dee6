package convert

import (
	"context"
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// objects are ConfigMaps and Secrets by name. The names of Secrets have the prefix "secret/".
type objects map[string]map[string]string

func (o objects) ConfigMap(_ context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	data, ok := o[name]
	if !ok || namespace != "default" {
		return nil, errdefs.NotFoundf("configmaps %q not found", name)
	}
	return &corev1.ConfigMap{Data: data}, nil
}

func (o objects) Secret(_ context.Context, namespace, name string) (*corev1.Secret, error) {
	data, ok := o["secret/"+name]
	if !ok || namespace != "default" {
		return nil, errdefs.NotFoundf("secrets %q not found", name)
	}
	s := &corev1.Secret{Data: map[string][]byte{}}
	for k, v := range data {
		s.Data[k] = []byte(v)
	}
	return s, nil
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

const (
	keyA = "ssh-ed25519 AAAAA a"
	keyB = "ssh-ed25519 AAAAB b"
)

var store = objects{
	"users":       {"users": "- name: cloudy\n", "ssh_pwauth": "true"},
	"one":         {"doc": "#!/bin/sh\n@virtlet-mount-script@\n", "doc64": b64("#!/bin/sh\necho\n"), "bad64": "hunter2!"},
	"broken":      {"good": "1", "bad": "[hunter2"},
	"keys":        {"authorized_keys": keyA + "\n", "other": keyB},
	"nokeys":      {"x": keyA},
	"net":         {"networkdata": "version: 2", "other": "version: 1"},
	"files":       {"a": b64("A"), "a_path": "/etc/a", "b": "B", "b_path": "/etc/b", "b_encoding": "plain", "c_path": "x", "c_path_path": "/etc/c", "c_path_encoding": "plain"},
	"nopath":      {"a": b64("A")},
	"badencoding": {"a": "A", "a_path": "/etc/a", "a_encoding": "rot13"},
	"relative":    {"a": "", "a_path": "etc/a"},
	"secret/keys": {"authorized_keys": keyB},
	"secret/pw":   {"password": "hush", "runcmd": "[ls]"},
}

func TestVirtletAnnotations(t *testing.T) {
	files := func(doc string, f ...cloudinit.File) string {
		out, err := cloudinit.AddFiles(doc, f)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for name, tc := range map[string]struct {
		annotations []string
		want        *vm.CloudInit
	}{
		"none": {nil, nil},
		"others alone need no cloud-init": {
			[]string{contract.KeyVirtletVCPUs, "2", contract.KeyVirtletDiskDriver, "scsi"}, nil,
		},
		"image type is case-folded": {
			[]string{contract.KeyVirtletImageType, "ConfigDrive"}, &vm.CloudInit{Datasource: "configdrive"},
		},
		"meta-data": {
			[]string{contract.KeyVirtletMetaData, `{"instance-id": "x"}`}, &vm.CloudInit{MetaData: `{"instance-id": "x"}`},
		},
		"user-data": {
			[]string{contract.KeyVirtletUserData, "runcmd: [ls]"}, &vm.CloudInit{UserData: "#cloud-config\nruncmd:\n  - ls\n"},
		},
		"user-data is merged over its source": {
			[]string{contract.KeyVirtletUserDataSource, "configmap/users", contract.KeyVirtletUserData, "users: [{name: me}]\nssh_pwauth: false"},
			&vm.CloudInit{UserData: "#cloud-config\n\"ssh_pwauth\": false\n\"users\":\n  - name: cloudy\n  - name: me\n"},
		},
		"user-data replaces its source": {
			[]string{contract.KeyVirtletUserDataSource, "configmap/users", contract.KeyVirtletUserData, "a: 1", contract.KeyVirtletUserDataOverwrite, "true"},
			&vm.CloudInit{UserData: "#cloud-config\na: 1\n"},
		},
		"overwrite is true for exactly true": {
			[]string{contract.KeyVirtletUserDataSource, "secret/pw", contract.KeyVirtletUserData, "a: 1", contract.KeyVirtletUserDataOverwrite, "True"},
			&vm.CloudInit{UserData: "#cloud-config\n\"password\": hush\n\"runcmd\":\n  - ls\na: 1\n"},
		},
		"script replaces user-data": {
			[]string{contract.KeyVirtletUserDataSource, "configmap/users", contract.KeyVirtletUserData, "a: 1", contract.KeyVirtletUserDataScript, "#!/bin/sh\n@virtlet-mount-script@\nls\n"},
			&vm.CloudInit{UserData: "#!/bin/sh\n\nls\n"},
		},
		"one key of the source is the whole document": {
			[]string{contract.KeyVirtletUserDataSource, "configmap/one", contract.KeyVirtletUserDataKey, "doc", contract.KeyVirtletUserData, "a: 1"},
			&vm.CloudInit{UserData: "#!/bin/sh\n\n"},
		},
		"in base64": {
			[]string{contract.KeyVirtletUserDataSource, "configmap/one", contract.KeyVirtletUserDataKey, "doc64", contract.KeyVirtletUserDataEncoding, "base64"},
			&vm.CloudInit{UserData: "#!/bin/sh\necho\n"},
		},
		"SSH keys are trimmed": {
			[]string{contract.KeyVirtletSSHKeys, "  " + keyA + " \n\n\t" + keyB + "\n"}, &vm.CloudInit{SSHKeys: []string{keyA, keyB}},
		},
		"SSH keys are appended to those of the source": {
			[]string{contract.KeyVirtletSSHKeySource, "secret/keys", contract.KeyVirtletSSHKeys, keyA}, &vm.CloudInit{SSHKeys: []string{keyB, keyA}},
		},
		"the key of SSH keys defaults to authorized_keys": {
			[]string{contract.KeyVirtletSSHKeySource, "configmap/keys"}, &vm.CloudInit{SSHKeys: []string{keyA}},
		},
		"SSH keys under another key": {
			[]string{contract.KeyVirtletSSHKeySource, "configmap/keys/other"}, &vm.CloudInit{SSHKeys: []string{keyB}},
		},
		"overwrite resets the SSH keys of the source": {
			[]string{contract.KeyVirtletSSHKeySource, "configmap/keys", contract.KeyVirtletSSHKeys, keyB, contract.KeyVirtletUserDataOverwrite, "true"},
			&vm.CloudInit{SSHKeys: []string{keyB}},
		},
		"overwrite without SSH keys keeps them": {
			[]string{contract.KeyVirtletSSHKeySource, "configmap/keys", contract.KeyVirtletUserDataOverwrite, "true"}, &vm.CloudInit{SSHKeys: []string{keyA}},
		},
		"DHCP is forced": {
			[]string{contract.KeyVirtletForceDHCP, "true"}, &vm.CloudInit{NetworkConfig: "dhcp"},
		},
		"network data": {
			[]string{contract.KeyNetworkData, "configmap/net"}, &vm.CloudInit{NetworkConfig: "version: 2"},
		},
		"network data of a key beats DHCP": {
			[]string{contract.KeyNetworkData, "configmap/net/other", contract.KeyVirtletForceDHCP, "true"}, &vm.CloudInit{NetworkConfig: "version: 1"},
		},
		"files": {
			[]string{contract.KeyVirtletFiles, "configmap/files", contract.KeyVirtletUserData, "a: 1"},
			&vm.CloudInit{UserData: files("#cloud-config\na: 1\n",
				cloudinit.File{Path: "/etc/a", Data: []byte("A")}, cloudinit.File{Path: "/etc/b", Data: []byte("B")}, cloudinit.File{Path: "/etc/c", Data: []byte("x")})},
		},
		"files beside a script": {
			[]string{contract.KeyVirtletFiles, "configmap/files", contract.KeyVirtletUserDataScript, "#!/bin/sh\n"},
			&vm.CloudInit{UserData: "#!/bin/sh\n", VendorData: files("",
				cloudinit.File{Path: "/etc/a", Data: []byte("A")}, cloudinit.File{Path: "/etc/b", Data: []byte("B")}, cloudinit.File{Path: "/etc/c", Data: []byte("x")})},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(annotate(tc.annotations...))
			if errs := Check(pod); len(errs) > 0 {
				t.Fatal(errs.ToAggregate())
			}
			got, err := CloudInit(t.Context(), pod, store)
			if err != nil {
				t.Fatal(err)
			}
			if d := diff.Of(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// The error of a source that a user can fix is FailedPrecondition, so that the pod waits. No message quotes content that may
// be secret.
func TestVirtletSourcesThatCannotBeUsed(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations []string
		want        string
	}{
		"a source that is not there":      {[]string{contract.KeyVirtletUserDataSource, "configmap/none"}, `configmap "none" not found`},
		"a secret that is not there":      {[]string{contract.KeyVirtletSSHKeySource, "secret/none"}, `secret "none" not found`},
		"a key that is no YAML":           {[]string{contract.KeyVirtletUserDataSource, "configmap/broken"}, "key bad"},
		"a key that is not there":         {[]string{contract.KeyVirtletUserDataSource, "configmap/one", contract.KeyVirtletUserDataKey, "zz"}, "no key zz"},
		"a key that is not base64":        {[]string{contract.KeyVirtletUserDataSource, "configmap/one", contract.KeyVirtletUserDataKey, "bad64", contract.KeyVirtletUserDataEncoding, "base64"}, "key bad64 is not valid base64"},
		"a document of no known kind":     {[]string{contract.KeyVirtletUserDataSource, "configmap/one", contract.KeyVirtletUserDataKey, "bad64"}, "does not begin with"},
		"no authorized_keys":              {[]string{contract.KeyVirtletSSHKeySource, "configmap/nokeys"}, "no key authorized_keys"},
		"keys that are none":              {[]string{contract.KeyVirtletSSHKeySource, "configmap/one/bad64"}, "SSH key 1"},
		"a file without a path":           {[]string{contract.KeyVirtletFiles, "configmap/nopath"}, "no key a_path"},
		"a file of another encoding":      {[]string{contract.KeyVirtletFiles, "configmap/badencoding"}, "key a_encoding"},
		"a file at a relative path":       {[]string{contract.KeyVirtletFiles, "configmap/relative"}, "must be absolute"},
		"base64 is the encoding of files": {[]string{contract.KeyVirtletFiles, "configmap/files64"}, "key a is not valid base64"},
	} {
		t.Run(name, func(t *testing.T) {
			store["files64"] = map[string]string{"a": "hunter2!", "a_path": "/a"}
			_, err := CloudInit(t.Context(), plain(annotate(tc.annotations...)), store)
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q in it", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("it quotes the source: %v", err)
			}
		})
	}
	down := errors.New("connection refused")
	if _, err := CloudInit(t.Context(), plain(annotate(contract.KeyVirtletUserDataSource, "configmap/cm")), cluster{fail: down}); !errors.Is(err, down) {
		t.Errorf("if the API server is unreachable, the error must be the Resolver's: %v", err)
	}
}

func TestVirtletAnnotationsThatCannotWork(t *testing.T) {
	for key, value := range map[string]string{
		contract.KeyVirtletVCPUs:          "256",
		contract.KeyVirtletDiskDriver:     "ide",
		contract.KeyVirtletImageType:      "ec2",
		contract.KeyVirtletMetaData:       "[hunter2",
		contract.KeyVirtletUserData:       "- hunter2",
		contract.KeyVirtletUserDataScript: "hunter2",
		contract.KeyVirtletUserDataSource: "hostpath/x",
		contract.KeyVirtletSSHKeys:        "hunter2",
		contract.KeyVirtletSSHKeySource:   "secret",
	} {
		errs := Check(plain(annotate(key, value)))
		if len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), key) || strings.Contains(errs.ToAggregate().Error(), "hunter2") {
			t.Errorf("%s: %v", key, errs)
		}
	}
}

func TestVirtletSizes(t *testing.T) {
	s := Spec(plain(annotate(contract.KeyVirtletVCPUs, "3", contract.KeyVirtletRootVolumeSize, "4Gi")), Node{}, nil)
	if s.CPUs != 3 || s.Storage != 4<<30 {
		t.Errorf("%d CPUs, %d bytes", s.CPUs, s.Storage)
	}
	s = Spec(plain(annotate(contract.KeyVirtletVCPUs, "-1", contract.KeyVirtletRootVolumeSize, "0", contract.KeyStorage, "1Gi")), Node{}, nil)
	if s.CPUs != DefaultCPUs || s.Storage != 1<<30 {
		t.Errorf("%d CPUs, %d bytes", s.CPUs, s.Storage)
	}
	got := Ignored(plain(annotate(contract.KeyVirtletDiskDriver, "scsi", contract.KeyVirtletCPUModel, "host-model", contract.KeyVirtletChownMounts, "true")))
	if len(got) != 3 || len(Ignored(plain(annotate(contract.KeyVirtletDiskDriver, "virtio")))) != 0 {
		t.Errorf("%v", got)
	}
}
