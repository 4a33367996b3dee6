package convert

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func ofClaim(name string, readOnly bool) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name, ReadOnly: readOnly}}
}

// device gives a container a claim as a device instead of a mount.
func device(name string, src corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: src})
		p.Spec.Containers[0].VolumeDevices = append(p.Spec.Containers[0].VolumeDevices, corev1.VolumeDevice{Name: name, DevicePath: "/dev/" + name})
	}
}

func TestDisksOfClaims(t *testing.T) {
	pod := plain(
		vol("data", ofClaim("data", false)), vol("reader", ofClaim("data", true)), vol("old", ofClaim("old", false)),
		vol("tmp", corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}), device("raw", ofClaim("raw", false)),
		func(p *corev1.Pod) {
			p.Spec.SecurityContext.FSGroup = ptr(int64(2000))
			p.Spec.SecurityContext.FSGroupChangePolicy = ptr(corev1.FSGroupChangeOnRootMismatch)
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "unused", VolumeSource: ofClaim("nobody", false)})
		})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, nil)
	if err := Fill(t.Context(), pod, Node{}, depot{}, s.Volumes); err != nil {
		t.Fatal(err)
	}
	use := func(id, fs string, readOnly bool) *vm.VolumeUse {
		return &vm.VolumeUse{Ref: id, ReadOnly: readOnly, FSType: fs, GroupOnMismatch: true}
	}
	group := ptr(int64(2000))
	want := []vm.Volume{
		{Name: "data", Kind: vm.VolumeDisk, Group: group, Disk: use("01data", "xfs", false)},
		{Name: "reader", Kind: vm.VolumeDisk, Group: group, Disk: use("01data", "xfs", true)},
		{Name: "old", Kind: vm.VolumeDisk, Group: group, Disk: use("01old", "", true)},
		{Name: "tmp", Kind: vm.VolumeDisk, Group: group, Disk: use("01tmp", "", false)},
		{Name: "raw", Kind: vm.VolumeDisk, Disk: use("01raw", "", false)},
	}
	got := slices.DeleteFunc(s.Volumes, func(v vm.Volume) bool { return v.Kind != vm.VolumeDisk })
	if d := diff.Of(want, got); d != "" {
		t.Errorf("volumes (-want +got):\n%s", d)
	}
	if mounts := s.Containers[0].Mounts; !slices.Contains(mounts, vm.Mount{Volume: "raw", Path: "/dev/raw", Device: true}) {
		t.Errorf("mounts %+v", mounts)
	}
}

func TestDisksThatDoNotFit(t *testing.T) {
	for want, change := range map[string]func(*corev1.Pod){
		`"raw" has volumeMode Block; container c needs it in volumeDevices`:      vol("x", ofClaim("raw", false)),
		`"data" has volumeMode Filesystem; container c needs it in volumeMounts`: device("x", ofClaim("data", false)),
	} {
		pod := plain(change)
		err := Fill(t.Context(), pod, Node{}, depot{}, Spec(pod, Node{}, nil).Volumes)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `volume "x"`) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	pod := plain(vol("x", ofClaim("nobody", false)))
	if err := Fill(t.Context(), pod, Node{}, depot{}, Spec(pod, Node{}, nil).Volumes); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `volume "x"`) {
		t.Errorf("a missing claim: %v", err)
	}
}

// TestDisksOfInstances: the claims of a VirtualMachineInstance are disks in either volumeMode. A folder is no disk.
func TestDisksOfInstances(t *testing.T) {
	instance := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: "web", UID: "1", Controller: ptr(true)}}
	}
	fill := func(claim string) (vm.Spec, error) {
		pod := plain(device("x", ofClaim(claim, false)), instance)
		s := Spec(pod, Node{}, nil)
		return s, Fill(t.Context(), pod, Node{}, depot{}, s.Volumes)
	}
	for _, claim := range []string{"data", "raw"} {
		s, err := fill(claim)
		if err != nil {
			t.Errorf("claim %s: %v", claim, err)
			continue
		}
		at := slices.IndexFunc(s.Volumes, func(v vm.Volume) bool { return v.Name == "x" })
		want := vm.Volume{Name: "x", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "01" + claim}}
		if d := diff.Of(want, s.Volumes[at]); d != "" {
			t.Errorf("claim %s (-want +got):\n%s", claim, d)
		}
		if mounts := s.Containers[0].Mounts; !slices.Contains(mounts, vm.Mount{Volume: "x", Path: "/dev/x", Device: true}) {
			t.Errorf("claim %s: mounts %+v", claim, mounts)
		}
	}
	if _, err := fill("local"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `"local" has volumeMode Filesystem, and its storage class gives a folder`) {
		t.Errorf("a folder: %v", err)
	}
}

func hostPath(path string, kind corev1.HostPathType) corev1.VolumeSource {
	return corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path, Type: &kind}}
}

// reading makes the mounts of a volume read-only.
func reading(volume string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i, m := range p.Spec.Containers[0].VolumeMounts {
			p.Spec.Containers[0].VolumeMounts[i].ReadOnly = m.ReadOnly || m.Name == volume
		}
	}
}

// TestFolders: hostPath, and claims whose volumes are folders of the node. Nobody may write to what is mounted only for reading.
func TestFolders(t *testing.T) {
	pod := plain(
		vol("any", hostPath("/srv/any/", corev1.HostPathUnset)), vol("made", hostPath("/srv/made", corev1.HostPathDirectoryOrCreate)),
		vol("there", hostPath("/srv/there", corev1.HostPathDirectory)), reading("there"),
		vol("local", ofClaim("local", false)), vol("reader", ofClaim("local", true)), vol("pv", ofClaim("hostpath", false)), reading("pv"),
		func(p *corev1.Pod) {
			p.Spec.SecurityContext.FSGroup = ptr(int64(2000))
			p.Spec.SecurityContext.FSGroupChangePolicy = ptr(corev1.FSGroupChangeOnRootMismatch)
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "unused", VolumeSource: hostPath("/srv/unused", corev1.HostPathUnset)})
		},
		vol("exported", corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "[fd00::1]", Path: "/data"}}), func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts[len(p.Spec.Containers[0].VolumeMounts)-1].ReadOnly = true
		})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, nil)
	if err := Fill(t.Context(), pod, Node{}, depot{}, s.Volumes); err != nil {
		t.Fatal(err)
	}
	group := ptr(int64(2000))
	want := []vm.Volume{
		{Name: "any", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/srv/any", Create: true}},
		{Name: "made", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/srv/made", Create: true}},
		{Name: "there", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/srv/there", ReadOnly: true}},
		{Name: "local", Kind: vm.VolumeDir, Group: group, Dir: &vm.HostDir{Path: "/mnt/local", GroupOnMismatch: true}},
		{Name: "reader", Kind: vm.VolumeDir, Group: group, Dir: &vm.HostDir{Path: "/mnt/local", ReadOnly: true, GroupOnMismatch: true}},
		{Name: "pv", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/mnt/hostpath", ReadOnly: true}},
		{Name: "exported", Kind: vm.VolumeNFS, NFS: &vm.NFS{Server: "fd00::1", Path: "/data", ReadOnly: true}},
	}
	got := slices.DeleteFunc(s.Volumes, func(v vm.Volume) bool { return v.Kind != vm.VolumeDir && v.Kind != vm.VolumeNFS })
	if d := diff.Of(want, got); d != "" {
		t.Errorf("volumes (-want +got):\n%s", d)
	}
	if got := Shared(pod); !slices.Equal(got, []string{"any", "made", "there", "exported"}) {
		t.Errorf("folders %v", got)
	}
}
