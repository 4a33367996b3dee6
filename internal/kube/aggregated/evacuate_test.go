package aggregated

import (
	"strings"
	"testing"

	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestCancelEvacuation(t *testing.T) {
	leaving := instance("web", v1.Running)
	leaving.Status.EvacuationNodeName = "n"
	r := start(t, machine("Always"), leaving)
	node := func() string {
		vmi := &v1.VirtualMachineInstance{}
		if err := r.client.Get(t.Context(), client.ObjectKeyFromObject(leaving), vmi); err != nil {
			t.Fatal(err)
		}
		return vmi.Status.EvacuationNodeName
	}
	for _, c := range []struct{ path, body, code, left string }{
		{"virtualmachineinstances/web/evacuate/cancel", `{"evacuationNodeName":"m"}`, "409", "n"},
		{"virtualmachineinstances/web/evacuate/cancel", `{"dryRun":["All"]}`, "202", "n"},
		{"virtualmachineinstances/web/evacuate/cancel", `{"dryRun":["Some"]}`, "400", "n"},
		{"virtualmachineinstances/web/evacuate", `{}`, "404", "n"},
		{"virtualmachineinstances/web/evacuate/cancel/now", `{}`, "404", "n"},
		{"virtualmachineinstances/none/evacuate/cancel", `{}`, "404", "n"},
		{"virtualmachines/web/evacuate/cancel", `{"evacuationNodeName":"n"}`, "202", ""},
		{"virtualmachineinstances/web/evacuate/cancel", `{}`, "202", ""},
	} {
		if got := r.put(c.path, c.body); !strings.HasPrefix(got, c.code) || node() != c.left {
			t.Errorf("%s %s: %s; node %q", c.path, c.body, got, node())
		}
	}
	off := start(t, machine("Halted"))
	if got := off.put("virtualmachines/web/evacuate/cancel", `{}`); !strings.HasPrefix(got, "409") || !strings.Contains(got, "VM is not running") {
		t.Error(got)
	}
}
