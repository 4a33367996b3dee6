package kubevirt

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

func keysOf(secret string, how v1.SSHPublicKeyAccessCredentialPropagationMethod) v1.AccessCredential {
	c := &v1.SSHPublicKeyAccessCredential{PropagationMethod: how}
	if secret != "" {
		c.Source.Secret = &v1.AccessCredentialSecretSource{SecretName: secret}
	}
	return v1.AccessCredential{SSHPublicKey: c}
}

func TestCredentials(t *testing.T) {
	noCloud := v1.SSHPublicKeyAccessCredentialPropagationMethod{NoCloud: &v1.NoCloudSSHPublicKeyAccessCredentialPropagation{}}
	drive := v1.SSHPublicKeyAccessCredentialPropagationMethod{ConfigDrive: &v1.ConfigDriveSSHPublicKeyAccessCredentialPropagation{}}
	both := noCloud
	both.ConfigDrive = drive.ConfigDrive
	vmi := &v1.VirtualMachineInstance{Spec: *spec(t, cirros)}
	vmi.Spec.AccessCredentials = []v1.AccessCredential{keysOf("team", noCloud), keysOf("robot", noCloud), keysOf("team", noCloud)}
	if errs, _ := CheckInstance(vmi); len(errs) > 0 {
		t.Fatal(errs)
	}
	pod := Pod(vmi)
	if got := pod.Annotations[contract.KeySSHSecrets]; got != "team,robot" {
		t.Errorf("Secrets %q", got)
	}
	named := ""
	for _, v := range pod.Spec.Volumes {
		if v.Projected != nil {
			for _, s := range v.Projected.Sources {
				named += s.Secret.Name + " "
			}
		}
	}
	if !strings.HasPrefix(named, "team robot ") {
		t.Errorf("the node may read %q", named)
	}
	for name, c := range map[string]struct {
		with v1.AccessCredential
		want string
	}{
		"nothing":           {v1.AccessCredential{}, "spec.accessCredentials[0]: Required"},
		"no Secret":         {keysOf("", noCloud), "spec.accessCredentials[0].sshPublicKey.source.secret.secretName: Required"},
		"no method":         {keysOf("team", v1.SSHPublicKeyAccessCredentialPropagationMethod{}), "propagationMethod: Forbidden: give one of"},
		"two methods":       {keysOf("team", both), "propagationMethod: Forbidden: give one of"},
		"no such volume":    {keysOf("team", drive), "propagationMethod.configDrive: Forbidden: the instance needs a volume cloudInitConfigDrive"},
		"no user":           {agentKeys(), "qemuGuestAgent.users: Required"},
		"no such user":      {agentKeys("a", "b:c"), `qemuGuestAgent.users[1]: Invalid value: "b:c"`},
		"no such name":      {password("../a"), "userPassword.source.secret.secretName: Invalid"},
		"no agent":          {v1.AccessCredential{UserPassword: &v1.UserPasswordAccessCredential{Source: password("a").UserPassword.Source}}, "propagationMethod.qemuGuestAgent: Required"},
		"a key, a password": {v1.AccessCredential{UserPassword: password("a").UserPassword, SSHPublicKey: keysOf("team", noCloud).SSHPublicKey}, "accessCredentials[0]: Forbidden"},
	} {
		s := spec(t, cirros)
		s.AccessCredentials = []v1.AccessCredential{c.with}
		errs, _ := Check(s, field.NewPath("spec"))
		if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), c.want) {
			t.Errorf("%s: %v; want %s", name, errs, c.want)
		}
	}
}

func agentKeys(users ...string) v1.AccessCredential {
	return keysOf("team", v1.SSHPublicKeyAccessCredentialPropagationMethod{QemuGuestAgent: &v1.QemuGuestAgentSSHPublicKeyAccessCredentialPropagation{Users: users}})
}

func password(secret string) v1.AccessCredential {
	return v1.AccessCredential{UserPassword: &v1.UserPasswordAccessCredential{
		Source:            v1.UserPasswordAccessCredentialSource{Secret: &v1.AccessCredentialSecretSource{SecretName: secret}},
		PropagationMethod: v1.UserPasswordAccessCredentialPropagationMethod{QemuGuestAgent: &v1.QemuGuestAgentUserPasswordAccessCredentialPropagation{}},
	}}
}

// What the agent sets is in an annotation of the pod, and its node may read the Secrets. The cloud-init does not get them.
func TestLogins(t *testing.T) {
	noCloud := v1.SSHPublicKeyAccessCredentialPropagationMethod{NoCloud: &v1.NoCloudSSHPublicKeyAccessCredentialPropagation{}}
	vmi := &v1.VirtualMachineInstance{Spec: *spec(t, cirros)}
	vmi.Spec.AccessCredentials = []v1.AccessCredential{agentKeys("a", "b"), password("words"), agentKeys("c"), keysOf("boot", noCloud)}
	if errs, _ := CheckInstance(vmi); len(errs) > 0 {
		t.Fatal(errs)
	}
	pod := Pod(vmi)
	if got, want := pod.Annotations[contract.KeyLogins], `{"keys":{"team":["a","b","c"]},"passwords":["words"]}`; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	if got := pod.Annotations[contract.KeySSHSecrets]; got != "boot" {
		t.Errorf("cloud-init has %q", got)
	}
	if list := convert.Unnamed(pod); len(list) > 0 {
		t.Errorf("the node may not read %v", list)
	}
}
