package nodejson_test

import (
	"encoding/json"
	"reflect"
	"testing"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/nodewire"
)

func TestStatsArriveWhole(t *testing.T) {
	want := guest.Stats{
		CPUSeconds: 1.5, MemoryTotal: 2, MemoryUsed: 3, DiskTotal: 4, DiskUsed: 5, Processes: 6, LoadAverage1: 0.7, NetworkRxBytes: 8, NetworkTxBytes: 9,
		Containers: []guest.ContainerStats{{Name: "app", CPUSeconds: 0.5, Memory: 10}, {Name: "side", CPUSeconds: 0.25, Memory: 11}},
	}
	text, err := json.Marshal(nodejson.FromStats("web", want))
	if err != nil {
		t.Fatal(err)
	}
	var back nodejson.Stats
	if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back.Stats(), want) || back.Name != "web" {
		t.Errorf("as JSON: %+v, %v", back, err)
	}
	if got := nodewire.DecodeStats(nodewire.EncodeStats(want)); !reflect.DeepEqual(got, want) {
		t.Errorf("as a message: %+v", got)
	}
}
