package kubevirt

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
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
		"nothing":           {v1.AccessCredential{}, "spec.accessCredentials[0].sshPublicKey: Required"},
		"no Secret":         {keysOf("", noCloud), "spec.accessCredentials[0].sshPublicKey.source.secret.secretName: Required"},
		"no method":         {keysOf("team", v1.SSHPublicKeyAccessCredentialPropagationMethod{}), "propagationMethod: Required"},
		"two methods":       {keysOf("team", both), "propagationMethod: Forbidden: give one of"},
		"no such volume":    {keysOf("team", drive), "propagationMethod.configDrive: Forbidden: the instance needs a volume cloudInitConfigDrive"},
		"by the agent":      {keysOf("team", v1.SSHPublicKeyAccessCredentialPropagationMethod{QemuGuestAgent: &v1.QemuGuestAgentSSHPublicKeyAccessCredentialPropagation{Users: []string{"a"}}}), "qemuGuestAgent.users: Forbidden"},
		"a user's password": {v1.AccessCredential{UserPassword: &v1.UserPasswordAccessCredential{}}, "userPassword: Forbidden"},
	} {
		s := spec(t, cirros)
		s.AccessCredentials = []v1.AccessCredential{c.with}
		errs, _ := Check(s, field.NewPath("spec"))
		if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), c.want) {
			t.Errorf("%s: %v; want %s", name, errs, c.want)
		}
	}
}
