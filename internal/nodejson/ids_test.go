package nodejson_test

import (
	"encoding/json"
	"testing"

	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestIDsAndAddressesArriveWhole(t *testing.T) {
	rec := vm.Record{ID: "a", SnapshotIDs: []string{"one", "two"}, NICs: []vm.NIC{
		{MAC: "m", IP: "10.0.0.2", Prefix: 24, DHCP: true, DNS: []string{"9.9.9.9"}}, {MAC: "n", IP: "10.0.1.2", Prefix: 24}, {MAC: "o"},
	}}
	text, err := json.Marshal(nodejson.FromRecord(rec))
	var v nodejson.VM
	if err != nil || json.Unmarshal(text, &v) != nil {
		t.Fatalf("%v in %s", err, text)
	}
	if d := diff.Of(rec, v.Record()); d != "" {
		t.Errorf("VM: %s", d)
	}
	snap := snapshot.Snapshot{ID: "a", ImageBlobIDs: []string{"x", "y"}, Hypervisor: "qemu", Record: vm.Record{Spec: vm.Spec{Driver: "firecracker"}}}
	text, err = json.Marshal(nodejson.FromSnapshot(snap))
	var s nodejson.Snapshot
	if err != nil || json.Unmarshal(text, &s) != nil {
		t.Fatalf("%v in %s", err, text)
	}
	if d := diff.Of(snap, s.Value()); d != "" {
		t.Errorf("snapshot: %s", d)
	}
}

// A vk-cocoon that is upgraded before the cocoon binary reads the forms of earlier releases.
func TestEarlierFormsAreRead(t *testing.T) {
	var v nodejson.VM
	err := json.Unmarshal([]byte(`{"snapshot_ids":["two","one"],"network_configs":[{"dhcp":true,"network":{"ip":"10.0.0.2","prefix":24}}]}`), &v)
	if err != nil {
		t.Fatal(err)
	}
	if r := v.Record(); len(r.SnapshotIDs) != 2 || r.NICs[0].IP != "10.0.0.2" {
		t.Errorf("got %+v", r)
	}
	if err := json.Unmarshal([]byte(`{"snapshot_ids":null}`), &v); err != nil {
		t.Error(err)
	}
	if err := json.Unmarshal([]byte(`{"snapshot_ids":7}`), &v); err == nil {
		t.Error("a number is accepted as a set of ids")
	}
}
