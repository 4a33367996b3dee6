package aggregated

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// A dump of memory is a request in the status of the machine. The machine's controller passes it on, and tells there what became of it.

// dumpOverhead is what a volume with a dump needs beside the memory of the guest: video memory, firmware, and the file system, in bytes.
const dumpOverhead = 64 << 20

// memoryDump asks for the memory of a machine that runs. Without the name of a claim it is dumped again to the claim that has the last dump.
func (s *Server) memoryDump(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.VirtualMachineMemoryDumpRequest
	if err := decode(w, r, &o); err != nil {
		return err
	}
	dry, err := dryRun(r, nil)
	if err != nil {
		return err
	}
	x, err := s.volumesOf(r.Context(), t, dry)
	if err != nil {
		return err
	}
	ask := v1.VirtualMachineMemoryDumpRequest{ClaimName: o.ClaimName, Phase: v1.MemoryDumpAssociating}
	if was := x.vm.Status.MemoryDumpRequest; was != nil {
		switch {
		case ask.ClaimName != "" && ask.ClaimName != was.ClaimName:
			return conflict(t, "can't request memory dump for pvc [%s] while pvc [%s] is still associated as the memory dump pvc; remove that first (virtctl memory-dump remove %s)", ask.ClaimName, was.ClaimName, t.Name)
		case was.Phase != v1.MemoryDumpCompleted && was.Phase != v1.MemoryDumpFailed || was.Remove:
			return conflict(t, "memory dump request for vm [%s] already exists, and is not over: %s", t.Name, was.Phase)
		}
		ask.ClaimName = was.ClaimName
	}
	switch {
	case ask.ClaimName == "":
		return apierrors.NewBadRequest("claimName: Required value: name the PersistentVolumeClaim that the memory is written to")
	case x.pod == nil:
		return conflict(t, "VM is not running")
	case usesClaim(x.pod, ask.ClaimName):
		return conflict(t, "PersistentVolumeClaim %s is a disk of this VM", ask.ClaimName)
	}
	if err := s.room(r.Context(), x, ask.ClaimName); err != nil {
		return err
	}
	if err := s.prepare(r.Context(), x, ask.ClaimName); err != nil {
		return err
	}
	return accepted(w, s.requestDump(r.Context(), x, &ask))
}

// removeMemoryDump ends the association of a machine with the claim of its last dump, which stays there.
func (s *Server) removeMemoryDump(w http.ResponseWriter, r *http.Request, t target) error {
	dry, err := dryRun(r, nil)
	if err != nil {
		return err
	}
	vm, _, err := s.pair(r.Context(), t)
	if err != nil {
		return err
	}
	was := vm.Status.MemoryDumpRequest
	switch {
	case was == nil:
		return conflict(t, "can't remove memory dump association for vm %s, no association found", t.Name)
	case was.Remove:
		return conflict(t, "memory dump remove request for vm [%s] already exists", t.Name)
	}
	ask := v1.VirtualMachineMemoryDumpRequest{ClaimName: was.ClaimName, Phase: v1.MemoryDumpDissociating, Remove: true}
	return accepted(w, s.requestDump(r.Context(), volumes{target: t, vm: vm, dry: dry}, &ask))
}

// requestDump writes the request to the status of the machine, unless there is another one since it was read.
func (s *Server) requestDump(ctx context.Context, x volumes, ask *v1.VirtualMachineMemoryDumpRequest) error {
	return s.patch(ctx, x.target, x.vm, true, x.dry, step{"test", "/status/memoryDumpRequest", x.vm.Status.MemoryDumpRequest}, step{"add", "/status/memoryDumpRequest", ask})
}

// room refuses a claim that is too small for the memory of the running instance.
func (s *Server) room(ctx context.Context, x volumes, name string) error {
	claim := &corev1.PersistentVolumeClaim{}
	if err := s.opts.Client.Get(ctx, client.ObjectKey{Namespace: x.Namespace, Name: name}, claim); err != nil {
		if apierrors.IsNotFound(err) {
			return conflict(x.target, "PersistentVolumeClaim %s does not exist in namespace %s", name, x.Namespace)
		}
		return fmt.Errorf("get persistentvolumeclaim %s/%s: %w", x.Namespace, name, err)
	}
	has := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	if q, bound := claim.Status.Capacity[corev1.ResourceStorage]; bound {
		has = q
	}
	if need := resource.NewQuantity(kubevirt.GuestMemory(&x.vmi.Spec)+dumpOverhead, resource.BinarySI); has.Cmp(*need) < 0 {
		return conflict(x.target, "PersistentVolumeClaim %s has %s, and the dump of the memory needs %s", name, has.String(), need)
	}
	return nil
}
