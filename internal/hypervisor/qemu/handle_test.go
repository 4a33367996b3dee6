package qemu

import (
	"encoding/json"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// The handle as the first build wrote it: every later build of this version must find a guest that the first build started.
func TestHandleOfTheFirstBuild(t *testing.T) {
	const id = "aaaaaaaaaaaaaaaaaaaaaaaaaa"
	old := `{"driver":"qemu","version":1,"id":"` + id + `","pid":4711,"start":99,"uuid":"` + jail.UUID(id) + `","dir":"/run/cocoon/vms/` + id + `","uid":1879048192}`
	h, err := decodeHandle([]byte(old))
	if err != nil {
		t.Fatal(err)
	}
	if h.PID != 4711 || h.Start != 99 || h.UID != 1879048192 || h.ID != id {
		t.Errorf("%+v", h)
	}
	again, err := jail.Encode(&h)
	if err != nil {
		t.Fatal(err)
	}
	var a, b map[string]any
	if json.Unmarshal([]byte(old), &a) != nil || json.Unmarshal(again, &b) != nil {
		t.Fatal("the handle is no JSON")
	}
	for key, value := range a {
		if b[key] != value {
			t.Errorf("%s is %v, and the first build expects %v", key, b[key], value)
		}
	}
}
