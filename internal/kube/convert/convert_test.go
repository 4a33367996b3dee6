package convert

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func ptr[T any](v T) *T { return &v }

// plain returns a pod as a node gets it from the API server, with defaults and the token volume.
func plain(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "uid-1", Annotations: map[string]string{}, Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyAlways, DNSPolicy: corev1.DNSClusterFirst, ServiceAccountName: "default",
			TerminationGracePeriodSeconds: ptr(int64(30)), EnableServiceLinks: ptr(true),
			SecurityContext: &corev1.PodSecurityContext{},
			Volumes:         []corev1.Volume{{Name: "kube-api-access-x7", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}}},
			Containers: []corev1.Container{{
				Name: "c", Image: "cocoon/demo:latest", ImagePullPolicy: corev1.PullAlways,
				VolumeMounts: []corev1.VolumeMount{{Name: "kube-api-access-x7", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount", ReadOnly: true}},
			}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func on(f func(*corev1.Container)) func(*corev1.Pod) {
	return func(p *corev1.Pod) { f(&p.Spec.Containers[0]) }
}

func annotate(kv ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := 0; i < len(kv); i += 2 {
			p.Annotations[kv[i]] = kv[i+1]
		}
	}
}

func TestCheckRefuses(t *testing.T) {
	sc := func(s corev1.SecurityContext) func(*corev1.Pod) {
		return on(func(c *corev1.Container) { c.SecurityContext = &s })
	}
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		want   string // a part of the message
	}{
		"host network": {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, "spec.hostNetwork"},
		"host pid":     {func(p *corev1.Pod) { p.Spec.HostPID = true }, "spec.hostPID"},
		"host ipc":     {func(p *corev1.Pod) { p.Spec.HostIPC = true }, "spec.hostIPC"},
		"no container": {func(p *corev1.Pod) { p.Spec.Containers = nil }, "at least one container"},
		"one bad container of two": {func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "b", Image: "b", Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80, HostIP: "127.0.0.1"}}})
		}, "spec.containers[1].ports[0].hostIP"},
		"windows init container": {func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "i", Image: "i", SecurityContext: &corev1.SecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{}}}}
		}, "spec.initContainers[0].securityContext.windowsOptions"},
		"another image for several": {func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "i", Image: "i"}}
			p.Annotations[contract.KeyImage], p.Annotations[contract.KeyMode] = "other:1", "run"
		}, "can have this annotation"},
		"restart of all containers": {on(func(c *corev1.Container) {
			c.RestartPolicy = ptr(corev1.ContainerRestartPolicyNever)
			c.RestartPolicyRules = []corev1.ContainerRestartRule{{Action: corev1.ContainerRestartRuleActionRestartAllContainers, ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{}}}
		}), "spec.containers[0].restartPolicyRules[0].action"},
		"host alias": {func(p *corev1.Pod) {
			p.Spec.HostAliases = []corev1.HostAlias{{IP: "10.0.0.9", Hostnames: []string{"a b"}}}
		}, "no valid names"},
		"dns none": {func(p *corev1.Pod) { p.Spec.DNSPolicy = corev1.DNSNone }, "dnsPolicy None needs a name server"},
		"long name of its own": {func(p *corev1.Pod) {
			p.Name, p.Spec.Subdomain, p.Spec.SetHostnameAsFQDN = strings.Repeat("a", 50), "sub", ptr(true)
		}, "at most 64 characters"},
		"volume": {func(p *corev1.Pod) { p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "data"}) }, `volume "data"`},
		"mount":  {on(func(c *corev1.Container) { c.VolumeMounts[0].MountPath = "/proc" }), "belongs to the guest's kernel"},
		"host port over IPv6": {on(func(c *corev1.Container) {
			c.Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80, HostIP: "fd00::1"}}
		}), "hostIP"},
		"host port without a port of the guest": {on(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{HostPort: 80}} }), "between 1 and 65535"},
		"stop signal": {on(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{StopSignal: new(corev1.Signal("no signal"))}
		}), "invalid stop signal"},
		"sysctl": {func(p *corev1.Pod) {
			p.Spec.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "../etc", Value: "1"}}
		}, "invalid name of a sysctl"},
		"capability": {sc(corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"ALL", "FLY"}}}), "spec.containers[0].securityContext.capabilities.add[1]"},
		"hugepages": {on(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("2Mi")}
		}), "hugepages-2Mi"},
		"hugepages and memory": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("128Mi"), "memory": resource.MustParse("128Mi")}
			annotate(contract.KeyHardware, `{"hugePages": true}`)(p)
		}, "limits[memory]"},
		"hugepages of two sizes": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("1Gi"), "hugepages-1Gi": resource.MustParse("1Gi")}
			annotate(contract.KeyHardware, `{"hugePages": true}`)(p)
		}, "limits[hugepages-1Gi]"},
		"hugepages of no size": {annotate(contract.KeyHardware, `{"hugePages": true}`), "limits[hugepages-2Mi]: Required"},
		"gpu": {on(func(c *corev1.Container) {
			c.Resources.Requests = corev1.ResourceList{"example.com/gpu": resource.MustParse("1")}
		}), "example.com/gpu"},
		"bad annotation":  {annotate(contract.KeyProbePort, "99999"), "probe-port"},
		"static, nowhere": {annotate(contract.KeyMode, "static"), "needs this annotation"},
		"static, managed": {func(p *corev1.Pod) {
			annotate(contract.KeyMode, "static")(p)
			p.Annotations[contract.KeyManaged] = "true"
		}, "cannot manage a static VM"},
		"deletion policy":              {annotate(contract.KeyDeletionPolicy, "sleep"), "deletion-policy"},
		"hibernation for nobody":       {annotate(contract.KeyDeletionPolicy, "hibernate"), "this pod has none"},
		"hibernation for another name": {hibernates("ReplicaSet", nil), "gives each pod another name"},
		"hibernation of a managed VM":  {hibernates("Sandbox", map[string]string{contract.KeyManaged: "true", contract.KeyMode: "run"}), "conflicts with " + contract.KeyManaged},
		"hibernation beside a policy":  {hibernates("Sandbox", map[string]string{contract.KeySnapshotPolicy: "never"}), "conflicts with " + contract.KeySnapshotPolicy},
		"hibernation of a static VM":   {hibernates("Sandbox", map[string]string{contract.KeyMode: "static", contract.KeyID: "x", contract.KeyIP: "10.0.0.1"}), "cannot hibernate a static VM"},
		"hibernation with a claim": {func(p *corev1.Pod) {
			hibernates("StatefulSet", nil)(p)
			claims(p)
		}, "fits only its volume data"},
		"snapshot with a claim": {func(p *corev1.Pod) {
			annotate(contract.KeySnapshotPolicy, "always")(p)
			claims(p)
		}, "in no snapshot of the VM"},
		"snapshot policy": {annotate(contract.KeySnapshotPolicy, "sometimes"), "main-only"},
		"fork of itself":  {annotate(contract.KeyForkFrom, "vk-default-web"), "from itself"},
		"fork of nothing": {annotate(contract.KeyForkFrom, "a/b"), "must start with a letter"},
		"android guest":   {annotate(contract.KeyOS, "android"), "guests of linux and windows"},
		"macos guest":     {annotate(contract.KeyOS, "macos"), "guests of linux and windows"},
		"windows in firecracker": {func(p *corev1.Pod) {
			annotate(contract.KeyOS, "windows")(p)
			p.Annotations[contract.KeyBackend] = "firecracker"
		}, "firecracker cannot run windows"},
		"bad VM name":    {annotate(contract.KeyName, "a/b"), "must start with a letter"},
		"long name":      {annotate(contract.KeyName, strings.Repeat("a", 71)), "has 71 characters; at most 63"},
		"another's name": {annotate(contract.KeyName, "vk-victim-db"), "a VM of another namespace"},
		"another's fork": {annotate(contract.KeyForkFrom, "vk-victim-db"), "a VM of another namespace"},
		"another's state": {func(p *corev1.Pod) {
			p.Annotations[contract.KeyMode], p.Annotations[contract.KeyImage] = "clone", "victim/vk-victim-db:hibernate"
		}, "a VM of another namespace"},
		"1000 CPUs": {on(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1000")}
		}), "CPUs 1000"},
		"no image": {on(func(c *corev1.Container) { c.Image = "" }), "an image is needed"},
	} {
		t.Run(name, func(t *testing.T) {
			errs := Check(plain(tc.change))
			if len(errs) == 0 {
				t.Fatal("the pod is not refused")
			}
			if msg := errs.ToAggregate().Error(); !strings.Contains(msg, tc.want) {
				t.Errorf("the reason is %q, want %q in it", msg, tc.want)
			}
		})
	}
	if errs := Check(plain(func(p *corev1.Pod) { p.Name, p.Namespace = strings.Repeat("a", 200), strings.Repeat("n", 63) })); len(errs) > 0 {
		t.Errorf("a pod with a long name is refused: %v", errs)
	}
	both := Check(plain(func(p *corev1.Pod) { p.Spec.HostNetwork, p.Spec.HostPID = true, true }))
	if len(both) != 2 {
		t.Errorf("%d reasons for two faults: %v", len(both), both)
	}
}

func TestSpecGolden(t *testing.T) {
	for name, pod := range map[string]*corev1.Pod{
		"plain": plain(),
		"full": plain(annotate(contract.KeyName, "vm-1", contract.KeyImage, "other:2", contract.KeyMode, "run", contract.KeyManaged, "true",
			contract.KeyStorage, "20Gi", contract.KeyNetwork, "lab", contract.KeySnapshotPolicy, "never", contract.KeyBackend, "qemu"),
			func(p *corev1.Pod) {
				p.Spec.Hostname = "box"
				p.Spec.TerminationGracePeriodSeconds = ptr(int64(5))
				p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr(int64(1000)), RunAsGroup: ptr(int64(1000))}
			},
			on(func(c *corev1.Container) {
				c.Command = []string{"/bin/sh", "-c"}
				c.Args = []string{"echo $(GREETING) $$(GREETING) $(NOBODY) $"}
				c.WorkingDir, c.TTY = "/srv", true
				c.SecurityContext = &corev1.SecurityContext{RunAsUser: ptr(int64(7))}
				c.Resources = corev1.ResourceRequirements{
					Limits:   corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("10Mi")},
					Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"), "ephemeral-storage": resource.MustParse("3Gi")},
				}
			})),
		"requests": plain(func(p *corev1.Pod) { p.Name = "a.b." + strings.Repeat("c", 46) },
			on(func(c *corev1.Container) {
				c.Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("1Gi"), "ephemeral-storage": resource.MustParse("3Gi")}
			})),
	} {
		t.Run(name, func(t *testing.T) {
			if errs := Check(pod); len(errs) > 0 {
				t.Fatal(errs.ToAggregate())
			}
			spec := Spec(pod, Node{Name: "n1", IP: "10.0.0.1"}, Environment{"c": {Env: []vm.EnvVar{{Name: "GREETING", Value: "hi"}}}})
			if err := spec.Validate(); err != nil {
				t.Error(err)
			}
			got, err := json.MarshalIndent(spec, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join("testdata", name+".json"), append(got, '\n'))
		})
	}
}

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s:\n%s\nwant\n%s", path, got, want)
	}
}

type cluster struct{ fail error }

func (c cluster) ConfigMap(_ context.Context, _, name string) (*corev1.ConfigMap, error) {
	if c.fail != nil {
		return nil, c.fail
	}
	if name != "cm" {
		return nil, errdefs.NotFoundf("configmaps %q not found", name)
	}
	return &corev1.ConfigMap{Data: map[string]string{"a": "1", "b": "2", "bad=key": "x"}}, nil
}

func (c cluster) Secret(_ context.Context, _, name string) (*corev1.Secret, error) {
	if name != "sec" {
		return nil, errdefs.NotFoundf("secrets %q not found", name)
	}
	return &corev1.Secret{Data: map[string][]byte{"pw": []byte("hush")}}, nil
}

func TestEnv(t *testing.T) {
	ref := corev1.LocalObjectReference{Name: "cm"}
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	size := func(name, divisor string) *corev1.EnvVarSource {
		f := &corev1.ResourceFieldSelector{Resource: name}
		if divisor != "" {
			f.Divisor = resource.MustParse(divisor)
		}
		return &corev1.EnvVarSource{ResourceFieldRef: f}
	}
	pod := plain(on(func(c *corev1.Container) {
		c.EnvFrom = []corev1.EnvFromSource{
			{Prefix: "CM_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: ref}},
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "none"}, Optional: ptr(true)}},
		}
		c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1500m")}
		c.Env = []corev1.EnvVar{
			{Name: "CM_a", Value: "over"},
			{Name: "BOTH", Value: "$(CM_a)-$(CM_b)-$(LATER)"},
			{Name: "LATER", Value: "x"},
			{Name: "KEY", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: ref, Key: "b"}}},
			{Name: "GONE", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: ref, Key: "z", Optional: ptr(true)}}},
			{Name: "PW", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "sec"}, Key: "pw"}}},
			{Name: "POD", ValueFrom: field("metadata.name")},
			{Name: "NS", ValueFrom: field("metadata.namespace")},
			{Name: "UID", ValueFrom: field("metadata.uid")},
			{Name: "APP", ValueFrom: field("metadata.labels['app']")},
			{Name: "LABELS", ValueFrom: field("metadata.labels")},
			{Name: "NODE", ValueFrom: field("spec.nodeName")},
			{Name: "HOST", ValueFrom: field("status.hostIP")},
			{Name: "CPU", ValueFrom: size("limits.cpu", "")},
			{Name: "MILLI", ValueFrom: size("limits.cpu", "1m")},
			{Name: "MEM", ValueFrom: size("limits.memory", "1Mi")},
		}
	}))
	var absent []string
	env, err := Env(t.Context(), pod, Node{Name: "n1", IP: "10.0.0.1"}, cluster{}, nil, func(a Absent) { absent = append(absent, a.Reason()+": "+a.String()) })
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{`OptionalSecretNotFound: secret "none" not found`, `OptionalConfigMapKeyNotFound: key "z" does not exist in configmap "cm"`}; !slices.Equal(absent, want) {
		t.Errorf("absent got %q", absent)
	}
	var got []string
	for _, e := range env["c"].Env {
		got = append(got, e.Name+"="+e.Value)
	}
	want := `CM_a=over CM_b=2 BOTH=over-2-$(LATER) LATER=x KEY=2 PW=hush POD=web NS=default UID=uid-1 APP=web LABELS=app="web" ` +
		`NODE=n1 HOST=10.0.0.1 CPU=2 MILLI=1500 MEM=256`
	if s := strings.Join(got, " "); s != want {
		t.Errorf("\n%s\nwant\n%s", s, want)
	}
}

func TestEnvWaitsForWhatIsMissing(t *testing.T) {
	pod := plain(on(func(c *corev1.Container) {
		c.EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "none"}}}}
	}))
	if _, err := Env(t.Context(), pod, Node{}, cluster{}, nil, nil); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `configmap "none" not found`) {
		t.Errorf("missing ConfigMap: %v", err)
	}
	pod = plain(on(func(c *corev1.Container) {
		c.Env = []corev1.EnvVar{{Name: "X", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "sec"}, Key: "zz"}}}}
	}))
	var reason string
	if _, err := Env(t.Context(), pod, Node{}, cluster{}, nil, func(a Absent) { reason += a.Reason() }); !errdefs.IsFailedPrecondition(err) || reason != "MandatorySecretKeyNotFound" {
		t.Errorf("missing key: %v, told as %s", err, reason)
	}
	down := errors.New("connection refused")
	pod = plain(on(func(c *corev1.Container) {
		c.EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}, Optional: ptr(true)}}}
	}))
	if _, err := Env(t.Context(), pod, Node{}, cluster{fail: down}, nil, nil); !errors.Is(err, down) {
		t.Errorf("an unreachable API server is no missing ConfigMap: %v", err)
	}
}

func TestProbeCommand(t *testing.T) {
	c := corev1.Container{Env: []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "$(A)2"}, {Name: "C", ValueFrom: &corev1.EnvVarSource{}}}}
	if got := ProbeCommand(&c, []string{"$(A)", "x$(B)", "$(C)"}); !slices.Equal(got, []string{"1", "x12", "$(C)"}) {
		t.Errorf("got %v", got)
	}
}

func FuzzExpand(f *testing.F) {
	for _, s := range []string{"", "$", "$$", "$(A)", "$$(A)", "$(", "$(A", "a$(B)c$(A)$$$(A)", "$()"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := expand(s, map[string]string{"A": "1"})
		if !strings.Contains(s, "$") && got != s {
			t.Errorf("%q became %q", s, got)
		}
		if len(got) > len(s) {
			t.Errorf("%q grew to %q", s, got)
		}
	})
}

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "EMPTY": ""}
	for in, want := range map[string]string{
		"$(A)": "1", "$$(A)": "$(A)", "$$$(A)": "$1", "$(X)": "$(X)", "a$": "a$", "$(A": "$(A", "$x": "$x", "[$(EMPTY)]": "[]", "$$$$": "$$",
	} {
		if got := expand(in, vars); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

// hibernates makes a pod of a controller of that kind, whose VM hibernates when the pod is deleted, with other annotations.
func hibernates(kind string, more map[string]string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "web", UID: "owner", Controller: new(true)}}
		maps.Copy(p.Annotations, more)
		p.Annotations[contract.KeyDeletionPolicy] = string(contract.DeleteHibernates)
	}
}

// claims gives a pod the volume data of a claim.
func claims(p *corev1.Pod) {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"},
	}})
	p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "data", MountPath: "/data"})
}

func TestHibernationOnDeletionIsAccepted(t *testing.T) {
	for _, kind := range []string{"Sandbox", "StatefulSet"} {
		p := plain(hibernates(kind, nil))
		if errs := Check(p); len(errs) > 0 {
			t.Errorf("%s: %v", kind, errs)
		}
		if Clone(p, Node{}).Labels[contract.VMLabelHibernate] != "true" {
			t.Errorf("%s: the VM has no label for it", kind)
		}
	}
}
