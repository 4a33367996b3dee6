package kubevirt

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// An instance has a virtio socket if it says so, and its status has the context id while the node reports one.
func TestVSOCK(t *testing.T) {
	yes, no := true, false
	for _, asked := range []*bool{nil, &no, &yes} {
		i := vmi(t, "web")
		i.Spec.Domain.Devices.AutoattachVSOCK = asked
		if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
			t.Fatal(errs, warnings)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Fatalf("a node refuses the pod: %v", errs)
		}
		h := convert.Spec(pod, convert.Node{}, nil).Hardware
		if got := h != nil && h.VSOCK; got != (asked == &yes) {
			t.Errorf("the VM has %+v", h)
		}
		for text, want := range map[string]uint32{"500017": 500017, "": 0, "x": 0, "-1": 0, "4294967296": 0} {
			pod.Annotations[contract.KeyCID] = text
			i.Status = Observe(i, pod, time.Now())
			got := uint32(0)
			if cid := i.Status.VSOCKCID; cid != nil {
				got = *cid
			}
			if got != want {
				t.Errorf("%q: the status has %d", text, got)
			}
		}
	}
}
