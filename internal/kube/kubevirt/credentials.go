package kubevirt

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/guest"
)

// credentials checks that each credential is a Secret with SSH keys, which the guest gets by cloud-init or its agent, or with passwords, by its agent.
func (c *check) credentials() {
	for i, a := range c.spec.AccessCredentials {
		at := c.at.Child("accessCredentials").Index(i)
		switch {
		case a.SSHPublicKey != nil && a.UserPassword != nil:
			c.errs = append(c.errs, field.Forbidden(at, "give one of sshPublicKey and userPassword"))
		case a.SSHPublicKey != nil:
			c.sshKey(a.SSHPublicKey, at.Child("sshPublicKey"))
		case a.UserPassword != nil:
			at = at.Child("userPassword")
			c.secret(a.UserPassword.Source.Secret, at)
			if a.UserPassword.PropagationMethod.QemuGuestAgent == nil {
				c.errs = append(c.errs, field.Required(at.Child("propagationMethod", "qemuGuestAgent"), ""))
			}
		default:
			c.errs = append(c.errs, field.Required(at, "give sshPublicKey or userPassword"))
		}
	}
}

func (c *check) secret(s *v1.AccessCredentialSecretSource, at *field.Path) {
	at = at.Child("source", "secret", "secretName")
	if s == nil || s.SecretName == "" {
		c.errs = append(c.errs, field.Required(at, ""))
		return
	}
	for _, why := range validation.IsDNS1123Subdomain(s.SecretName) {
		c.errs = append(c.errs, field.Invalid(at, s.SecretName, why))
	}
}

func (c *check) sshKey(ssh *v1.SSHPublicKeyAccessCredential, at *field.Path) {
	c.secret(ssh.Source.Secret, at)
	at = at.Child("propagationMethod")
	m := ssh.PropagationMethod
	given := 0
	for _, is := range []bool{m.NoCloud != nil, m.ConfigDrive != nil, m.QemuGuestAgent != nil} {
		if is {
			given++
		}
	}
	if given != 1 {
		c.errs = append(c.errs, field.Forbidden(at, "give one of noCloud, configDrive and qemuGuestAgent"))
	}
	has := func(of func(v1.Volume) bool) bool { return slices.ContainsFunc(c.spec.Volumes, of) }
	if m.NoCloud != nil && !has(func(v v1.Volume) bool { return v.CloudInitNoCloud != nil }) {
		c.errs = append(c.errs, field.Forbidden(at.Child("noCloud"), "the instance needs a volume cloudInitNoCloud"))
	}
	if m.ConfigDrive != nil && !has(func(v v1.Volume) bool { return v.CloudInitConfigDrive != nil }) {
		c.errs = append(c.errs, field.Forbidden(at.Child("configDrive"), "the instance needs a volume cloudInitConfigDrive"))
	}
	if agent := m.QemuGuestAgent; agent != nil {
		users := at.Child("qemuGuestAgent", "users")
		if len(agent.Users) == 0 {
			c.errs = append(c.errs, field.Required(users, ""))
		}
		for i, user := range agent.Users {
			if err := guest.ValidUser(user); err != nil {
				c.errs = append(c.errs, field.Invalid(users.Index(i), user, err.Error()))
			}
		}
	}
}

// keySecrets returns the Secrets with SSH keys for the cloud-init of the guest, each once.
func keySecrets(s *v1.VirtualMachineInstanceSpec) (out []string) {
	for _, a := range s.AccessCredentials {
		if ssh := a.SSHPublicKey; ssh != nil && ssh.PropagationMethod.QemuGuestAgent == nil && !slices.Contains(out, ssh.Source.Secret.SecretName) {
			out = append(out, ssh.Source.Secret.SecretName)
		}
	}
	return out
}

// logins returns what the agent in the guest sets.
func logins(s *v1.VirtualMachineInstanceSpec) (l contract.Logins) {
	for _, a := range s.AccessCredentials {
		switch {
		case a.UserPassword != nil:
			l.Passwords = append(l.Passwords, a.UserPassword.Source.Secret.SecretName)
		case a.SSHPublicKey != nil && a.SSHPublicKey.PropagationMethod.QemuGuestAgent != nil:
			if l.Keys == nil {
				l.Keys = map[string][]string{}
			}
			secret := a.SSHPublicKey.Source.Secret.SecretName
			l.Keys[secret] = append(l.Keys[secret], a.SSHPublicKey.PropagationMethod.QemuGuestAgent.Users...)
		}
	}
	return l
}

// loginsVolume returns a volume that lets the node of a pod read Secrets; no container mounts it. taken are the volumes of the pod.
func loginsVolume(secrets []string, taken []corev1.Volume) corev1.Volume {
	name := "access-credentials"
	for slices.ContainsFunc(taken, func(v corev1.Volume) bool { return v.Name == name }) {
		name += "-x"
	}
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: projected(secrets)}}
}

func projected(secrets []string) *corev1.ProjectedVolumeSource {
	p := &corev1.ProjectedVolumeSource{}
	for _, name := range secrets {
		p.Sources = append(p.Sources, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: name}}})
	}
	return p
}
