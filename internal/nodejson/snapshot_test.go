package nodejson_test

import (
	"encoding/json"
	"testing"

	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestHypervisorOfASnapshot: the documented key says what the VM asked for, because the documented virtual node compares
// it with what a pod asks for; our own key says what took the snapshot.
func TestHypervisorOfASnapshot(t *testing.T) {
	for asked, documented := range map[string]string{"": "cloud-hypervisor", "cloud-hypervisor": "cloud-hypervisor", "firecracker": "firecracker", "qemu": "qemu"} {
		data, err := json.Marshal(nodejson.FromSnapshot(snapshot.Snapshot{Hypervisor: "qemu", Record: vm.Record{Spec: vm.Spec{Driver: asked}}}))
		if err != nil {
			t.Fatal(err)
		}
		var keys struct{ Hypervisor, Driver string }
		var back nodejson.Snapshot
		if err := json.Unmarshal(data, &keys); err != nil || keys.Hypervisor != documented || keys.Driver != "qemu" {
			t.Errorf("%q: %+v, %v", asked, keys, err)
		}
		if err := json.Unmarshal(data, &back); err != nil || back.Value().Hypervisor != "qemu" || back.Value().Backend() != documented {
			t.Errorf("%q: %+v, %v", asked, back.Value(), err)
		}
	}
	var earlier nodejson.Snapshot
	if err := json.Unmarshal([]byte(`{"hypervisor":"qemu"}`), &earlier); err != nil || earlier.Value().Hypervisor != "qemu" || earlier.Value().Backend() != "cloud-hypervisor" {
		t.Errorf("of an earlier release: %+v, %v", earlier.Value(), err)
	}
}
