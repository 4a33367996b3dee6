package cocoond

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/block"
)

// TestVolumesOfRunningVMsAreNotReleased: neither a folder that a running VM shares nor a device that it has is released, and a device is
// not used again before its driver has published it.
func TestVolumesOfRunningVMsAreNotReleased(t *testing.T) {
	dir := t.TempDir()
	devices, err := block.New(t.Context(), block.Config{Dir: filepath.Join(dir, "store"), Files: true})
	if err != nil {
		t.Fatal(err)
	}
	defer devices.Close()
	disk := filepath.Join(dir, "disk")
	if err := os.WriteFile(disk, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	owner := vm.Owner{Namespace: "prod"}
	folder := csinode.Published{Key: csinode.Key{Owner: owner, Holder: "pod", Name: "folder"}, Access: csinode.AsFolder, Path: "/published/folder"}
	device := csinode.Published{Key: csinode.Key{Owner: owner, Holder: "pod", Name: "device"}, Access: csinode.AsDevice, Path: disk}
	of := vm.OnBehalf(t.Context(), owner)
	lent, err := devices.Lend(of, owner, volume.Spec{Name: lentName(device.Key)}, disk)
	if err != nil {
		t.Fatal(err)
	}
	sharing := vm.Record{ID: vm.NewID(), Owner: owner, Spec: vm.Spec{Name: "sharing", Volumes: []vm.Volume{{Name: "a", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: folder.Path, Published: true}}}}}
	having := vm.Record{ID: vm.NewID(), Owner: owner, Spec: vm.Spec{Name: "having"}}
	if _, _, err := devices.Attach(of, string(lent.ID), having.ID, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	p := &plugins{devices: devices}
	for _, c := range []struct {
		of      csinode.Published
		running []vm.Record
		user    string // that the error names; "": it is released
	}{
		{folder, []vm.Record{having, sharing}, "prod/sharing"},
		{device, []vm.Record{having, sharing}, "prod/having"},
		{folder, []vm.Record{having}, ""},
		{device, []vm.Record{sharing}, ""},
		{csinode.Published{Key: csinode.Key{Owner: owner, Holder: "pod", Name: "interrupted"}, Access: csinode.AsDevice}, []vm.Record{having, sharing}, ""},
	} {
		err := p.withdraw(t.Context(), c.of, c.running)
		if c.user == "" && err != nil || c.user != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), c.user)) {
			t.Errorf("%s, while %d VMs run: %v, want one that names %q", c.of.Key, len(c.running), err, c.user)
		}
	}
	if _, here, err := devices.Lent(of, owner, lentName(device.Key)); err != nil || here {
		t.Errorf("the device of a released volume is here: %t, %v", here, err)
	}
}
