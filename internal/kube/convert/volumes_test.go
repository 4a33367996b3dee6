package convert

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	labelset "k8s.io/apimachinery/pkg/labels"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// depot is a Source with fixed content.
type depot struct{ broken error }

func (c depot) ConfigMap(_ context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	if c.broken != nil {
		return nil, c.broken
	}
	if name != "conf" || namespace != "default" {
		return nil, errdefs.NotFoundf("no such object")
	}
	return &corev1.ConfigMap{Data: map[string]string{"a": "1", "b": "2"}, BinaryData: map[string][]byte{"bin": {0xff, 0}}}, nil
}

func (c depot) Secret(_ context.Context, _, name string) (*corev1.Secret, error) {
	if name != "hush" {
		return nil, errdefs.NotFoundf("no such object")
	}
	return &corev1.Secret{Data: map[string][]byte{"key": []byte("s3cr3t")}}, nil
}

func (c depot) Token(_ context.Context, pod *corev1.Pod, audience string, seconds int64) (string, error) {
	if audience == "refused" {
		return "", errdefs.Unavailablef("no tokens now")
	}
	return fmt.Sprintf("token of %s for %q, %d s", pod.Spec.ServiceAccountName, audience, seconds), nil
}

// trusted has the bundles of the signer "test/one": the second and third share a certificate.
func trusted(name string, group string, certificates ...string) certv1.ClusterTrustBundle {
	b := certv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"group": group}}, Spec: certv1.ClusterTrustBundleSpec{SignerName: "test/one"}}
	for _, c := range certificates {
		b.Spec.TrustBundle += string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(c)}))
	}
	return b
}

func (c depot) Certificate(_ context.Context, _ *corev1.Pod, _ Node, volume string, source int, p *corev1.PodCertificateProjection) (key, chain []byte, err error) {
	return []byte("key "), fmt.Appendf(nil, "of %s for %s %d", p.SignerName, volume, source), nil
}

var trustedBundles = []certv1.ClusterTrustBundle{trusted("one", "a", "1"), trusted("two", "b", "3", "2"), trusted("three", "b", "2")}

func (c depot) TrustBundle(_ context.Context, name string) (*certv1.ClusterTrustBundle, error) {
	for _, b := range trustedBundles {
		if b.Name == name {
			return &b, nil
		}
	}
	return nil, errdefs.NotFoundf("no such object")
}

func (c depot) Disk(_ context.Context, pod *corev1.Pod, v *corev1.Volume) (Disk, error) {
	claim, ephemeral := ClaimName(pod, v), v.Ephemeral != nil
	switch {
	case v.CSI != nil:
		return Disk{Dir: &vm.HostDir{Path: "/published/" + v.CSI.Driver, Published: true}, Group: true}, nil
	case claim == "data" && !ephemeral:
		return Disk{ID: "01data", FSType: "xfs"}, nil
	case claim == "raw" && !ephemeral:
		return Disk{ID: "01raw", Device: true}, nil
	case claim == "old" && !ephemeral:
		return Disk{ID: "01old", ReadOnly: true}, nil
	case claim == pod.Name+"-tmp" && ephemeral:
		return Disk{ID: "01tmp"}, nil
	}
	for name, group := range map[string]bool{"local": true, "hostpath": false} {
		if claim == name && !ephemeral {
			return Disk{Dir: &vm.HostDir{Path: "/mnt/" + name}, Group: group}, nil
		}
	}
	return Disk{}, errdefs.Preconditionf("persistentvolumeclaim %q not found", claim)
}

func (c depot) TrustBundles(_ context.Context, signer string, match labelset.Selector) ([]certv1.ClusterTrustBundle, error) {
	return slices.DeleteFunc(slices.Clone(trustedBundles), func(b certv1.ClusterTrustBundle) bool {
		return b.Spec.SignerName != signer || !match.Matches(labelset.Set(b.Labels))
	}), nil
}

func vol(name string, src corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: src})
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/" + name})
	}
}

func ref(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }

func TestVolumesThatAreRefused(t *testing.T) {
	for want, src := range map[string]corev1.VolumeSource{
		"hostPath of type Socket: a VM can have only":     {HostPath: &corev1.HostPathVolumeSource{Path: "/run/x.sock", Type: ptr(corev1.HostPathSocket)}},
		"hostPath of type CharDevice":                     {HostPath: &corev1.HostPathVolumeSource{Path: "/dev/null", Type: ptr(corev1.HostPathCharDev)}},
		"hostPath of type BlockDevice":                    {HostPath: &corev1.HostPathVolumeSource{Path: "/dev/sda", Type: ptr(corev1.HostPathBlockDev)}},
		`hostPath: "srv" is not an absolute path`:         {HostPath: &corev1.HostPathVolumeSource{Path: "srv"}},
		`hostPath: "/srv/../etc" is not an absolute path`: {HostPath: &corev1.HostPathVolumeSource{Path: "/srv/../etc"}},
		`nfs: "" is not the name or address`:              {NFS: &corev1.NFSVolumeSource{Path: "/data"}},
		`nfs: "a b" is not the name or address`:           {NFS: &corev1.NFSVolumeSource{Server: "a b", Path: "/data"}},
		`nfs: "data" is not a path on an NFS server`:      {NFS: &corev1.NFSVolumeSource{Server: "nfs", Path: "data"}},
		"gitRepo: a VM cannot have such a volume":         {GitRepo: &corev1.GitRepoVolumeSource{}},
		"the volume names no image":                       {Image: &corev1.ImageVolumeSource{}},
		"the volume has no source":                        {},
		`emptyDir medium "HugePages"`:                     {EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumHugePages}},
		"this node does not support the projected source": {Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{}}}},
	} {
		err := Check(plain(vol("data", src))).ToAggregate()
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `volume "data"`) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	for _, src := range []corev1.VolumeSource{
		{ConfigMap: &corev1.ConfigMapVolumeSource{}},
		{Secret: &corev1.SecretVolumeSource{}},
		{DownwardAPI: &corev1.DownwardAPIVolumeSource{}},
		{EmptyDir: &corev1.EmptyDirVolumeSource{}},
		{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}},
		{Ephemeral: &corev1.EphemeralVolumeSource{}},
		{NFS: &corev1.NFSVolumeSource{Server: "nfs.default.svc", Path: "/"}},
		{NFS: &corev1.NFSVolumeSource{Server: "[fd00::1]", Path: "/data"}},
		{Image: &corev1.ImageVolumeSource{Reference: "demo"}},
		{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{}}}}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{PodCertificate: &corev1.PodCertificateProjection{}}}}},
	} {
		if errs := Check(plain(vol("data", src))); len(errs) > 0 {
			t.Errorf("%s is refused: %v", kindOf(src), errs)
		}
	}
	shared := plain(vol("data", corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}), on(func(c *corev1.Container) {
		c.VolumeMounts[1].MountPropagation = ptr(corev1.MountPropagationBidirectional)
	}))
	if err := Check(shared).ToAggregate(); err == nil || !strings.Contains(err.Error(), "mountPropagation") {
		t.Errorf("propagation: %v", err)
	}
}

func TestVolumeFiles(t *testing.T) {
	one := func(s ...corev1.VolumeProjection) corev1.VolumeSource {
		return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: s, DefaultMode: ptr(int32(0o440))}}
	}
	trust := func(p corev1.ClusterTrustBundleProjection) corev1.VolumeProjection {
		p.Path = "ca"
		return corev1.VolumeProjection{ClusterTrustBundle: &p}
	}
	certificates := func(list ...string) string { return trusted("", "", list...).Spec.TrustBundle }
	item := func(key, path string, mode *int32) corev1.KeyToPath {
		return corev1.KeyToPath{Key: key, Path: path, Mode: mode}
	}
	field := func(path, field string) corev1.DownwardAPIVolumeFile {
		return corev1.DownwardAPIVolumeFile{Path: path, FieldRef: &corev1.ObjectFieldSelector{FieldPath: field}}
	}
	for name, c := range map[string]struct {
		src    corev1.VolumeSource
		change func(*corev1.Pod)
		want   string // "path mode uid content" by line, or a part of the error
		class  errdefs.Class
	}{
		"config map": {
			src:  corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref("conf")}},
			want: "a 644 1|b 644 2|bin 644 \xff\x00",
		},
		"default mode": {
			src: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: ref("conf"), DefaultMode: ptr(int32(0o600)),
				Items: []corev1.KeyToPath{item("b", "deep/er", nil), item("a", "x", ptr(int32(0o755)))},
			}},
			want: "deep/er 600 2|x 755 1",
		},
		"config map is missing": {
			src:  corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref("nope")}},
			want: `MountVolume.SetUp failed for volume "data": configmap "nope" not found`, class: errdefs.FailedPrecondition,
		},
		"optional config map is missing": {src: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref("nope"), Optional: ptr(true)}}},
		"key is missing": {
			src:  corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "hush", Items: []corev1.KeyToPath{item("nope", "x", nil)}}},
			want: `secret hush has no key "nope"`, class: errdefs.FailedPrecondition,
		},
		"optional key is missing": {
			src:  corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "hush", Optional: ptr(true), Items: []corev1.KeyToPath{item("nope", "x", nil), item("key", "k", nil)}}},
			want: "k 644 s3cr3t",
		},
		"downward": {src: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{
			field("labels", "metadata.labels"), field("name", "metadata.name"), field("one", "metadata.labels['app']"),
			{Path: "memory", Mode: ptr(int32(0o400)), ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "c", Resource: "limits.memory", Divisor: resource.MustParse("1Mi")}},
		}}}, want: "labels 644 app=\"web\"|memory 400 256|name 644 web|one 644 web"},
		"projected, the last wins": {src: one(
			corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: ref("conf"), Items: []corev1.KeyToPath{item("a", "x", nil)}}},
			corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: ref("hush"), Items: []corev1.KeyToPath{item("key", "x", nil)}}},
			corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{field("ns", "metadata.namespace")}}},
		), want: "ns 440 default|x 440 s3cr3t"},
		"token": {src: one(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}}), want: `token 440 token of default for "", 3600 s`},
		"token of an audience": {
			src:    one(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t", Audience: "vault", ExpirationSeconds: ptr(int64(600))}}),
			change: func(p *corev1.Pod) { p.Spec.SecurityContext.RunAsUser = ptr(int64(7)) }, want: `t 600 u7 token of default for "vault", 600 s`,
		},
		"token for a group": {
			src:    one(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}}),
			change: func(p *corev1.Pod) { p.Spec.SecurityContext.FSGroup = ptr(int64(7)) }, want: `t 600 token of default for "", 3600 s`,
		},
		"trust bundle": {src: one(trust(corev1.ClusterTrustBundleProjection{Name: ptr("two")})), want: "ca 440 " + certificates("2", "3")},
		"trust bundle for a user": {
			src:    one(trust(corev1.ClusterTrustBundleProjection{Name: ptr("one")})),
			change: func(p *corev1.Pod) { p.Spec.SecurityContext.RunAsUser = ptr(int64(7)) }, want: "ca 600 u7 " + certificates("1"),
		},
		"trust bundles of a signer": {
			src:  one(trust(corev1.ClusterTrustBundleProjection{SignerName: ptr("test/one"), LabelSelector: &metav1.LabelSelector{}})),
			want: "ca 440 " + certificates("1", "2", "3"),
		},
		"trust bundles with a label": {
			src:  one(trust(corev1.ClusterTrustBundleProjection{SignerName: ptr("test/one"), LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"group": "b"}}})),
			want: "ca 440 " + certificates("2", "3"),
		},
		"no label selector matches nothing": {
			src:  one(trust(corev1.ClusterTrustBundleProjection{SignerName: ptr("test/one")})),
			want: `clustertrustbundle of signer test/one not found`, class: errdefs.FailedPrecondition,
		},
		"trust bundle is missing": {
			src:  one(trust(corev1.ClusterTrustBundleProjection{Name: ptr("nope")})),
			want: `clustertrustbundle nope not found`, class: errdefs.FailedPrecondition,
		},
		"optional trust bundle is missing": {src: one(trust(corev1.ClusterTrustBundleProjection{Name: ptr("nope"), Optional: ptr(true)})), want: "ca 440 "},
		"certificate": {src: one(
			corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{}},
			corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{SignerName: "s", CredentialBundlePath: "all", KeyPath: "key"}},
			corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{SignerName: "s", CertificateChainPath: "chain"}},
		), want: "all 440 key of s for data 1|chain 440 of s for data 2|key 440 key "},
		"no token": {
			src:  one(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t", Audience: "refused"}}),
			want: "no tokens now", class: errdefs.Unavailable,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(vol("data", c.src))
			if c.change != nil {
				c.change(pod)
			}
			files, err := Files(t.Context(), pod, Node{Name: "n"}, depot{}, "data")
			if c.class != 0 || err != nil {
				if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v (%v), want %q in it (%v)", err, errdefs.ClassOf(err), c.want, c.class)
				}
				return
			}
			var lines []string
			for _, f := range files {
				owner := ""
				if f.UID != nil {
					owner = fmt.Sprintf("u%d ", *f.UID)
				}
				lines = append(lines, fmt.Sprintf("%s %o %s%s", f.Path, f.Mode, owner, f.Data))
			}
			if got := strings.Join(lines, "|"); got != c.want {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
}

func TestVolumesAndMountsOfASpec(t *testing.T) {
	pod := plain(
		vol("mem", corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}}),
		vol("disk", corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}}),
		vol("conf", corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref("conf")}}),
		func(p *corev1.Pod) {
			p.Spec.SecurityContext.FSGroup = ptr(int64(2000))
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "unused", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "gone"}}})
			m := p.Spec.Containers[0].VolumeMounts
			m[1].MountPath, m[1].SubPathExpr = "/data/inner/", "$(NAME)/./x"
			m[2].MountPath = "/data"
			m[3].SubPath, m[3].ReadOnly = "a/", true
		})
	env := Environment{"c": {Env: []vm.EnvVar{{Name: "NAME", Value: "web"}}}}
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	if err := CheckMounts(pod, env); err != nil {
		t.Error(err)
	}
	if err := CheckMounts(pod, nil); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "NAME") {
		t.Errorf("without the variable: %v", err)
	}
	s := Spec(pod, Node{Name: "n"}, env)
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	var got []string
	for _, v := range s.Volumes {
		got = append(got, fmt.Sprint(v.Name, " ", v.Kind, " ", v.Memory, " ", v.SizeLimit, " ", *v.Group))
	}
	for _, m := range s.Containers[0].Mounts {
		got = append(got, fmt.Sprint(m.Volume, " ", m.Path, " ", m.SubPath, " ", m.ReadOnly))
	}
	want := []string{
		"kube-api-access-x7 files false 0 2000", "mem empty true 1048576 2000", "disk empty false 1048576 2000", "conf files false 0 2000",
		"disk /data  false", "conf /conf a true", "mem /data/inner web/x false",
		"kube-api-access-x7 /var/run/secrets/kubernetes.io/serviceaccount  true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	names, objects := Live(pod)
	if !slices.Equal(names, []string{"kube-api-access-x7", "conf"}) || !slices.Equal(objects, []Object{{KindConfigMap, "conf"}}) {
		t.Errorf("live are %v of %v", names, objects)
	}
	if err := Fill(t.Context(), pod, Node{}, depot{}, s.Volumes); err != nil || len(s.Volumes[3].Files) != 3 {
		t.Errorf("filled %+v, %v", s.Volumes, err)
	}
	broken := errors.New("broken")
	if err := Fill(t.Context(), pod, Node{}, depot{broken}, s.Volumes); !errors.Is(err, broken) || !strings.Contains(err.Error(), `volume "conf"`) {
		t.Errorf("a source that fails: %v", err)
	}
}

// The files of an image are a volume if a container mounts them. They have no group, and their image is pulled as the volume says.
func TestImageVolumes(t *testing.T) {
	files := func(ref string, policy corev1.PullPolicy) corev1.VolumeSource {
		return corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: ref, PullPolicy: policy}}
	}
	pod := plain(vol("data", files("files:1", corev1.PullAlways)), vol("never", files("files:2", corev1.PullNever)), func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "unused", VolumeSource: files("unused", corev1.PullAlways)})
		p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: new(int64(7))}
		p.Spec.Containers[0].VolumeMounts[len(p.Spec.Containers[0].VolumeMounts)-2].SubPath = "etc/os-release"
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, nil)
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, v := range s.ImageVolumes() {
		if v.Group != nil {
			t.Errorf("volume %s has the group %d", v.Name, *v.Group)
		}
		got = append(got, v.Name+" "+v.Image)
	}
	if want := []string{"data files:1", "never files:2"}; !slices.Equal(got, want) {
		t.Errorf("volumes %q, want %q", got, want)
	}
	got = nil
	for _, r := range Pulls(pod)[1:] {
		got = append(got, r.Name+" "+string(r.Policy))
	}
	if want := []string{"files:1 Always", "files:2 Never"}; !slices.Equal(got, want) {
		t.Errorf("pulls %q, want %q", got, want)
	}
	if names, _ := Live(pod); slices.Contains(names, "data") {
		t.Errorf("an image has content that changes: %q", names)
	}
}

func TestHostFile(t *testing.T) {
	file := &corev1.HostPathVolumeSource{Path: "/srv/token", Type: ptr(corev1.HostPathFile)}
	made := &corev1.HostPathVolumeSource{Path: "/srv/log", Type: ptr(corev1.HostPathFileOrCreate)}
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		Volumes: []corev1.Volume{
			{Name: "token", VolumeSource: corev1.VolumeSource{HostPath: file}},
			{Name: "log", VolumeSource: corev1.VolumeSource{HostPath: made}},
			{Name: "dir", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv"}}},
		},
		Containers: []corev1.Container{{Name: "c", VolumeMounts: []corev1.VolumeMount{
			{Name: "token", MountPath: "/token", ReadOnly: true}, {Name: "log", MountPath: "/log"}, {Name: "log", MountPath: "/part", SubPath: "x"}, {Name: "dir", MountPath: "/dir"},
		}}},
	}}
	for i := range pod.Spec.Volumes {
		if why := unservable(&pod.Spec.Volumes[i]); why != "" {
			t.Error(why)
		}
	}
	want := []vm.HostDir{{Path: "/srv/token", File: true, ReadOnly: true}, {Path: "/srv/log", File: true, Create: true}, {Path: "/srv", Create: true}}
	for i, v := range volumes(pod) {
		if d := diff.Of(want[i], *v.Dir); d != "" {
			t.Errorf("%s: %s", v.Name, d)
		}
	}
	var parts []string
	for _, m := range mounts(pod, &pod.Spec.Containers[0], nil) {
		parts = append(parts, m.Path+"="+m.SubPath)
	}
	if d := diff.Of("/token=file /log=file /part=x /dir=", strings.Join(parts, " ")); d != "" { // a part of a file is refused by its name
		t.Error(d)
	}
}
