package podprovider

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// TestMemoryDump: the memory of the VM is written once its claim has a volume, once for each request, over a restart of the node. The answer
// is an annotation.
func TestMemoryDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		w.create(pod())
		expect(t, w.after(5*time.Second), "Running running ready")
		answered := func(p *corev1.Pod, file, why string) {
			t.Helper()
			got := contract.ParseMemoryDumped(p.Annotations)
			if got.File != file || got.Why != why || file != "" && (got.Claim != "data" || got.Begun.IsZero() || got.Ended.Before(got.Begun)) {
				t.Errorf("it says %+v", got)
			}
		}
		w.annotate(contract.KeyMemoryDump, "data/one.dump")
		answered(w.after(5*time.Second), "", "")
		w.expectTold(`Warning MemoryDumpFailed The memory of VM ` + vmName + ` is not dumped yet: persistentvolumeclaim "data" not found`)
		w.disks()
		p := w.after(time.Minute)
		answered(p, "one.dump", "")
		w.expectTold("Normal MemoryDumped The memory of VM " + vmName + " is the file one.dump on the volume of claim data")
		expect(t, p, "Running running ready")

		w.stop() // the node is started again
		w.run(Config{})
		w.recall(t)
		answered(w.after(time.Hour), "one.dump", "")
		if n := w.engine.called("dump 01disk one.dump"); n != 1 {
			t.Errorf("%d dumps", n)
		}

		w.engine.fail(errdefs.Exhaustedf("the volume is too small"))
		w.annotate(contract.KeyMemoryDump, "data/two.dump")
		answered(w.after(time.Minute), "two.dump", "the volume is too small")
		w.expectTold("Warning MemoryDumpFailed The memory of VM " + vmName + " is not dumped to claim data: the volume is too small")
		w.engine.fail(nil)
		answered(w.after(time.Hour), "two.dump", "the volume is too small")
		w.annotate(contract.KeyMemoryDump, "data/../x")
		answered(w.after(time.Minute), "two.dump", "the volume is too small")
		if n := w.engine.called("dump 01disk two.dump"); n != 1 {
			t.Errorf("%d dumps", n)
		}
		w.annotate(contract.KeyMemoryDump, "data/three.dump")
		answered(w.after(time.Minute), "three.dump", "")
	})
}
