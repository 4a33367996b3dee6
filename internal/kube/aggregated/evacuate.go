package aggregated

import (
	"fmt"
	"net/http"

	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const cancelSubresource = "evacuate/cancel"

// cancelEvacuation takes back that a node is being emptied of an instance (evictionStrategy External). Another request to evict its pod asks
// again.
func (s *Server) cancelEvacuation(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.EvacuateCancelOptions
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, o.DryRun)
	if err != nil {
		return err
	}
	vmi, err := s.instance(r.Context(), t)
	if t.Resource == machines {
		_, vmi, err = s.pair(r.Context(), t)
	}
	if err != nil {
		return err
	}
	switch {
	case vmi == nil:
		return conflict(t, "VM is not running")
	case vmi.Status.EvacuationNodeName == "":
		return accepted(w, nil)
	case o.EvacuationNodeName != "" && o.EvacuationNodeName != vmi.Status.EvacuationNodeName:
		return conflict(t, "VMI is to leave node %s, not node %s", vmi.Status.EvacuationNodeName, o.EvacuationNodeName)
	}
	next := vmi.DeepCopy()
	next.Status.EvacuationNodeName = ""
	if err := s.opts.Client.Patch(r.Context(), next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{}), &client.PatchOptions{DryRun: dry}); err != nil {
		return fmt.Errorf("take back the evacuation of VirtualMachineInstance %s/%s: %w", vmi.Namespace, vmi.Name, err)
	}
	return accepted(w, nil)
}
