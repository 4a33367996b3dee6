package storage

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// TestVolumesThatNobodyHas: the node keeps them and says so. Those of claims and of PersistentVolumes, and those of others, are not meant.
func TestVolumesThatNobodyHas(t *testing.T) {
	alive := claim("alive", "node-1")
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-retained"}}
	n := prepare(t, alive, pv)
	stock := func(name, claim string) {
		spec := volume.Spec{Name: name, Size: volume.MinSize}
		if claim != "" {
			spec.Labels = map[string]string{contract.KeyVolumeClaim: claim}
		}
		if _, err := (stored{n.store, n}).Create(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "team"}), spec); err != nil {
			t.Fatal(err)
		}
	}
	stock("pvc-lost", "uid-lost")
	stock("pvc-retained", "uid-retained")
	stock("pvc-of-a-claim", string(alive.UID))
	stock("by-hand", "")
	n.run()
	n.create(claim("new", "node-1"))
	n.volume("new")
	select {
	case event := <-n.events.Events:
		if !strings.Contains(event, eventLeft) || !strings.Contains(event, "Volume pvc-lost of namespace team has neither a claim") {
			t.Errorf("the node says %q", event)
		}
	default:
		t.Error("the node says nothing")
	}
	select {
	case event := <-n.events.Events:
		t.Errorf("the node also says %q", event)
	default:
	}
	if all := n.kept("team"); len(all) != 6 { // and those of both claims
		t.Errorf("%d volumes: %+v", len(all), all)
	}
}
