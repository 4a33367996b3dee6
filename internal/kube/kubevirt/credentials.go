package kubevirt

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
)

// credentials checks that each credential is SSH keys of a Secret, which the cloud-init of the instance gives to the guest.
func (c *check) credentials() {
	for i, a := range c.spec.AccessCredentials {
		at := c.at.Child("accessCredentials").Index(i)
		ssh := a.SSHPublicKey
		if ssh == nil {
			if a.UserPassword == nil {
				c.errs = append(c.errs, field.Required(at.Child("sshPublicKey"), ""))
			}
			continue
		}
		at = at.Child("sshPublicKey")
		if s := ssh.Source.Secret; s == nil || s.SecretName == "" {
			c.errs = append(c.errs, field.Required(at.Child("source", "secret", "secretName"), ""))
		}
		at = at.Child("propagationMethod")
		m := ssh.PropagationMethod
		if m.NoCloud != nil && m.ConfigDrive != nil {
			c.errs = append(c.errs, field.Forbidden(at, "give one of noCloud and configDrive"))
		}
		has := func(of func(v1.Volume) bool) bool { return slices.ContainsFunc(c.spec.Volumes, of) }
		switch {
		case m.NoCloud != nil && !has(func(v v1.Volume) bool { return v.CloudInitNoCloud != nil }):
			c.errs = append(c.errs, field.Forbidden(at.Child("noCloud"), "the instance needs a volume cloudInitNoCloud"))
		case m.ConfigDrive != nil && !has(func(v v1.Volume) bool { return v.CloudInitConfigDrive != nil }):
			c.errs = append(c.errs, field.Forbidden(at.Child("configDrive"), "the instance needs a volume cloudInitConfigDrive"))
		case m.NoCloud == nil && m.ConfigDrive == nil && m.QemuGuestAgent == nil:
			c.errs = append(c.errs, field.Required(at, "give noCloud or configDrive"))
		}
	}
}

// keySecrets returns the Secrets with SSH keys for the guest, each once.
func keySecrets(s *v1.VirtualMachineInstanceSpec) (out []string) {
	for _, a := range s.AccessCredentials {
		if ssh := a.SSHPublicKey; ssh != nil && ssh.Source.Secret != nil && !slices.Contains(out, ssh.Source.Secret.SecretName) {
			out = append(out, ssh.Source.Secret.SecretName)
		}
	}
	return out
}
