package promptbinding

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	storage "k8s.io/component-helpers/storage/volume"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/volumebinding"
)

// stock stands for the binder of VolumeBinding: it looks after a second.
type stock struct {
	volumebinding.SchedulerVolumeBinder
	err   error
	ended chan error // receives what a call returns
}

func (s *stock) BindPodVolumes(ctx context.Context, _ *v1.Pod, _ *volumebinding.PodVolumes) (err error) {
	defer func() { s.ended <- err }()
	select {
	case <-time.After(time.Second):
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

type world struct {
	*binder
	stock                  *stock
	claims, volumes, nodes cache.Indexer
}

func newWorld(err error) world {
	index := func() cache.Indexer {
		return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	w := world{stock: &stock{err: err, ended: make(chan error, 1)}, claims: index(), volumes: index(), nodes: index()}
	w.binder = &binder{
		SchedulerVolumeBinder: w.stock, claims: listers.NewPersistentVolumeClaimLister(w.claims),
		volumes: listers.NewPersistentVolumeLister(w.volumes), nodes: listers.NewNodeLister(w.nodes),
	}
	return w
}

func (w world) put(t *testing.T, index cache.Indexer, object any) {
	t.Helper()
	if err := index.Add(object); err != nil {
		t.Fatal(err)
	}
}

var (
	pod  = &v1.Pod{Spec: v1.PodSpec{NodeName: "n1"}}
	node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{v1.LabelHostname: "n1"}}}
)

func provisions() *volumebinding.PodVolumes {
	return &volumebinding.PodVolumes{
		StaticBindings:    []*volumebinding.BindingInfo{},
		DynamicProvisions: []*volumebinding.DynamicProvision{{PVC: &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: "1"}}}},
	}
}

// boundClaim is the claim when it is bound.
func boundClaim() *v1.PersistentVolumeClaim {
	return &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "data", UID: "1",
			Annotations: map[string]string{storage.AnnSelectedNode: "n1", storage.AnnBindCompleted: "yes"},
		},
		Spec: v1.PersistentVolumeClaimSpec{VolumeName: "pv"},
	}
}

func volumeOf(host string) *v1.PersistentVolume {
	pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}}
	pv.Spec.NodeAffinity = &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{host}}},
	}}}}
	return pv
}

func TestPodIsBoundWithItsClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(nil)
		w.put(t, w.nodes, node)
		w.put(t, w.volumes, volumeOf("n1"))
		began := time.Now()
		time.AfterFunc(200*time.Millisecond, func() { w.put(t, w.claims, boundClaim()) })
		if err := w.BindPodVolumes(t.Context(), pod, provisions()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < 200*time.Millisecond || took > 220*time.Millisecond {
			t.Errorf("bound after %v, the claim after 200ms", took)
		}
		if err := <-w.stock.ended; err != nil {
			t.Errorf("the stock binder was interrupted: %v", err)
		}
	})
}

func TestOnlyTheStockBinderAccepts(t *testing.T) {
	refused := errors.New("refused")
	for name, edit := range map[string]func(*v1.PersistentVolumeClaim, *v1.PersistentVolume){
		"not bound": func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) { c.Spec.VolumeName = "" },
		"half bound": func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) {
			delete(c.Annotations, storage.AnnBindCompleted)
		},
		"given back": func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) {
			delete(c.Annotations, storage.AnnSelectedNode)
		},
		"another claim":  func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) { c.UID = "2" },
		"on its way out": func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) { c.DeletionTimestamp = &metav1.Time{} },
		"volume of a node": func(_ *v1.PersistentVolumeClaim, pv *v1.PersistentVolume) {
			pv.Spec.NodeAffinity = volumeOf("n2").Spec.NodeAffinity
		},
		"volume not there":     func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) { c.Spec.VolumeName = "other" },
		"in another namespace": func(c *v1.PersistentVolumeClaim, _ *v1.PersistentVolume) { c.Namespace = "elsewhere" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(refused)
				claim, pv := boundClaim(), volumeOf("n1")
				edit(claim, pv)
				w.put(t, w.nodes, node)
				w.put(t, w.claims, claim)
				w.put(t, w.volumes, pv)
				if err := w.BindPodVolumes(t.Context(), pod, provisions()); !errors.Is(err, refused) {
					t.Errorf("got %v, not what the stock binder says", err)
				}
			})
		})
	}
}

func TestVolumesThatExistAreLeftToTheStockBinder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		w := newWorld(refused)
		w.put(t, w.nodes, node)
		volumes := provisions()
		volumes.StaticBindings, volumes.DynamicProvisions = []*volumebinding.BindingInfo{{}}, nil
		if err := w.BindPodVolumes(t.Context(), pod, volumes); !errors.Is(err, refused) {
			t.Errorf("got %v", err)
		}
	})
}

func TestBindingEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(nil)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := w.BindPodVolumes(ctx, pod, provisions()); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

func TestReplace(t *testing.T) {
	cfg, err := latest.Default()
	if err != nil {
		t.Fatal(err)
	}
	enabled := cfg.Profiles[0].Plugins.MultiPoint.Enabled
	before := len(enabled)
	Replace(cfg.Profiles[0].Plugins)
	has := map[string]int{}
	for _, p := range cfg.Profiles[0].Plugins.MultiPoint.Enabled {
		has[p.Name]++
	}
	if has[Name] != 1 || has[names.VolumeBinding] != 0 || len(cfg.Profiles[0].Plugins.MultiPoint.Enabled) != before {
		t.Errorf("the default profile has %v", has)
	}
}

func TestDefaults(t *testing.T) {
	args, err := defaults()
	if err != nil || args.BindTimeoutSeconds == 0 {
		t.Errorf("got %+v, %v", args, err)
	}
}
