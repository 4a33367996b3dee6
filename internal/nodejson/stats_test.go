package nodejson_test

import (
	"encoding/json"
	"testing"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestStatsArriveWhole(t *testing.T) {
	want := guest.Stats{
		CPUSeconds: 1.5, MemoryTotal: 2, MemoryUsed: 3, DiskTotal: 4, DiskUsed: 5, Processes: 6, LoadAverage1: 0.7, NetworkRxBytes: 8, NetworkTxBytes: 9,
		Containers: []guest.ContainerStats{{
			Name: "app", CPUSeconds: 0.5, Memory: 10, MemoryTotal: 12, Anonymous: 13, PageFaults: 14, MajorFaults: 15, Written: &guest.DiskUse{Bytes: 16, Inodes: 17},
			Pressure: guest.Pressure{Memory: &guest.Stall{Some: guest.Waits{Total: 18, Avg10: 19, Avg60: 20, Avg300: 21}, Full: guest.Waits{Total: 22}}},
		}, {Name: "side", CPUSeconds: 0.25, Memory: 11}},
		Pressure: guest.Pressure{CPU: &guest.Stall{Some: guest.Waits{Avg10: 1}}, IO: &guest.Stall{}},
	}
	text, err := json.Marshal(nodejson.FromStats("web", want))
	if err != nil {
		t.Fatal(err)
	}
	var back nodejson.Stats
	if err := json.Unmarshal(text, &back); err != nil || back.Name != "web" {
		t.Errorf("as JSON: name %q, %v", back.Name, err)
	}
	if d := diff.Of(want, back.Stats()); d != "" {
		t.Errorf("as JSON: %s", d)
	}
	if d := diff.Of(want, nodewire.DecodeStats(nodewire.EncodeStats(want))); d != "" {
		t.Errorf("as a message: %s", d)
	}
}
