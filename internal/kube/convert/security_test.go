package convert

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func capable(add, drop []corev1.Capability) corev1.SecurityContext {
	return corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: add, Drop: drop}}
}

func TestSecurityOfAContainer(t *testing.T) {
	type caps = []corev1.Capability
	without := func(names ...string) []string {
		return slices.DeleteFunc(vm.DefaultCapabilities(), func(n string) bool { return slices.Contains(names, n) })
	}
	for name, tc := range map[string]struct {
		pod  corev1.PodSecurityContext
		own  corev1.SecurityContext
		want vm.Security
	}{
		"nothing asked":   {want: vm.Security{Capabilities: vm.DefaultCapabilities()}},
		"no escalation":   {own: corev1.SecurityContext{AllowPrivilegeEscalation: ptr(false)}, want: vm.Security{Capabilities: vm.DefaultCapabilities(), NoNewPrivileges: true}},
		"escalation":      {own: corev1.SecurityContext{AllowPrivilegeEscalation: ptr(true)}, want: vm.Security{Capabilities: vm.DefaultCapabilities()}},
		"drop all":        {own: capable(nil, caps{"ALL"}), want: vm.Security{}},
		"drop all, add":   {own: capable(caps{"NET_ADMIN"}, caps{"ALL"}), want: vm.Security{Capabilities: []string{"NET_ADMIN"}}},
		"add all":         {own: capable(caps{"ALL"}, nil), want: vm.Security{Capabilities: vm.AllCapabilities()}},
		"drop wins":       {own: capable(caps{"SYS_TIME", "KILL"}, caps{"KILL", "SYS_TIME"}), want: vm.Security{Capabilities: without("KILL")}},
		"other spellings": {own: capable(caps{"CAP_SYS_TIME"}, caps{"kill", "NOT_KNOWN"}), want: vm.Security{Capabilities: append(without("KILL"), "SYS_TIME")}},
		"privileged":      {own: corev1.SecurityContext{Privileged: ptr(true)}, want: vm.Security{Capabilities: vm.AllCapabilities()}},
		"not root":        {pod: corev1.PodSecurityContext{RunAsNonRoot: ptr(true)}, want: vm.Security{Capabilities: vm.DefaultCapabilities(), NonRoot: true}},
		"root after all":  {pod: corev1.PodSecurityContext{RunAsNonRoot: ptr(true)}, own: corev1.SecurityContext{RunAsNonRoot: ptr(false)}, want: vm.Security{Capabilities: vm.DefaultCapabilities()}},
		"groups":          {pod: corev1.PodSecurityContext{SupplementalGroups: []int64{5, 6}, FSGroup: ptr(int64(7))}, want: vm.Security{Capabilities: vm.DefaultCapabilities(), Groups: []int64{5, 6, 7}}},
		"default filter of system calls": {
			pod:  corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			want: vm.Security{Capabilities: vm.DefaultCapabilities(), Filtered: true},
		},
		"its own profile wins": {
			pod:  corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			own:  corev1.SecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined}},
			want: vm.Security{Capabilities: vm.DefaultCapabilities()},
		},
		"privileged has no filter": {
			pod:  corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			own:  corev1.SecurityContext{Privileged: ptr(true)},
			want: vm.Security{Capabilities: vm.AllCapabilities()},
		},
		"groups of the pod only": {
			pod:  corev1.PodSecurityContext{SupplementalGroupsPolicy: ptr(corev1.SupplementalGroupsPolicyStrict)},
			want: vm.Security{Capabilities: vm.DefaultCapabilities(), StrictGroups: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(func(p *corev1.Pod) { p.Spec.SecurityContext, p.Spec.Containers[0].SecurityContext = &tc.pod, &tc.own })
			if errs := Check(pod); len(errs) > 0 {
				t.Fatal(errs)
			}
			got := Spec(pod, Node{}, nil).Bootable().Process.Security
			if len(got.Capabilities) == 0 {
				got.Capabilities = nil
			}
			if d := diff.Of(&tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestUserStopSignalAndSysctls(t *testing.T) {
	pod := plain(func(p *corev1.Pod) {
		p.Spec.SecurityContext.RunAsGroup = ptr(int64(5))
		p.Spec.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}}
		p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{StopSignal: ptr(corev1.SIGUSR1)}
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, nil).Bootable()
	if s.Process.User != ":5" || s.Process.StopSignal != "SIGUSR1" || len(s.Sysctls) != 1 || s.Sysctls[0] != (vm.Sysctl{Name: "kernel.shm_rmid_forced", Value: "1"}) {
		t.Errorf("%+v, %+v", s.Process, s.Sysctls)
	}
}

func TestCheckUsers(t *testing.T) {
	for name, tc := range map[string]struct {
		image string
		uid   *int64
		gid   *int64
		want  string
	}{
		"root":             {image: "", want: `container has runAsNonRoot and image will run as root (pod: "web_default(uid-1)", container: c)`},
		"zero":             {image: "0:7", want: "image will run as root"},
		"name":             {image: "web", want: "container has runAsNonRoot and image has non-numeric user (web), cannot verify user is non-root"},
		"number":           {image: "1000"},
		"set to zero":      {image: "1000", uid: ptr(int64(0)), want: "container's runAsUser breaks non-root policy"},
		"set":              {image: "root", uid: ptr(int64(7))},
		"group of root":    {image: "", gid: ptr(int64(7)), want: "image will run as root"},
		"group of another": {image: "1000", gid: ptr(int64(7))},
	} {
		pod := plain(func(p *corev1.Pod) {
			p.Spec.SecurityContext.RunAsNonRoot, p.Spec.SecurityContext.RunAsUser, p.Spec.SecurityContext.RunAsGroup = ptr(true), tc.uid, tc.gid
		})
		err := CheckUsers(pod, map[string]string{"cocoon/demo:latest": tc.image})
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		if err := CheckUsers(pod, nil); err != nil {
			t.Errorf("%s, an image that boots itself: %v", name, err)
		}
		pod.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsNonRoot: ptr(false)}
		if err := CheckUsers(pod, map[string]string{"cocoon/demo:latest": tc.image}); err != nil {
			t.Errorf("%s without the rule: %v", name, err)
		}
	}
}

func TestCheckProfiles(t *testing.T) {
	seccomp := func(kind corev1.SeccompProfileType) corev1.SecurityContext {
		return corev1.SecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: kind, LocalhostProfile: ptr("x.json")}}
	}
	armor := func(kind corev1.AppArmorProfileType) corev1.SecurityContext {
		return corev1.SecurityContext{AppArmorProfile: &corev1.AppArmorProfile{Type: kind, LocalhostProfile: ptr("x")}}
	}
	for name, tc := range map[string]struct {
		own  corev1.SecurityContext
		want string
	}{
		"none":              {},
		"seccomp default":   {own: seccomp(corev1.SeccompProfileTypeRuntimeDefault)},
		"seccomp none":      {own: seccomp(corev1.SeccompProfileTypeUnconfined)},
		"seccomp of a node": {own: seccomp(corev1.SeccompProfileTypeLocalhost), want: `cannot load seccomp profile "x.json"`},
		"AppArmor default": {
			own:  corev1.SecurityContext{AppArmorProfile: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}},
			want: "cannot enforce AppArmor profile RuntimeDefault: AppArmor is not enabled in the guest",
		},
		"AppArmor none":      {own: armor(corev1.AppArmorProfileTypeUnconfined)},
		"AppArmor of a node": {own: armor(corev1.AppArmorProfileTypeLocalhost), want: `cannot enforce AppArmor profile x`},
	} {
		pod := plain(on(func(c *corev1.Container) { c.SecurityContext = &tc.own }))
		if errs := Check(pod); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		err := CheckProfiles(pod)
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
