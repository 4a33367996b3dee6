//go:build host

package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/vm"
)

// worker creates and changes its own objects, one verb at a time.
type worker struct {
	*crasher
	prefix string
	random *rand.Rand
}

// step applies one verb to a suitable object, if there is one.
func (w *worker) step(ctx context.Context) {
	verbs := []func(context.Context){
		w.create, w.run, w.run, w.hibernate, w.hibernate, w.wake, w.stop, w.remove, w.save, w.save, w.clone,
		w.removeSnapshot, w.importImage, w.removeImage,
	}
	verbs[w.random.IntN(len(verbs))](ctx)
}

// pick returns one of the worker's objects of a kind in one of states, or "".
func (w *worker) pick(kind string, states ...string) string {
	var names []string
	for _, o := range w.mine(kind) {
		if slices.Contains(states, o.may[0]) {
			names = append(names, o.name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return names[w.random.IntN(len(names))]
}

// mine returns the worker's objects of a kind that exist, as far as known.
func (w *worker) mine(kind string) []thing {
	return slices.DeleteFunc(w.truth.all(kind), func(o thing) bool {
		return !strings.HasPrefix(o.name, w.prefix) || len(o.may) != 1 || o.may[0] == gone
	})
}

// fresh returns a name that no object had, or "" if the worker has enough objects of the kind.
func (w *worker) fresh(kind string) string {
	if len(w.mine(kind)) >= crowd {
		return ""
	}
	return fmt.Sprintf("%s%d", w.prefix, w.serial.Add(1))
}

func spec(name string) vm.Spec {
	return vm.Spec{Name: name, Image: "demo", CPUs: 1, Memory: 128 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}}}.Default()
}

// create creates a VM for QEMU without starting it, with everything that it would boot from.
func (w *worker) create(ctx context.Context) {
	if name := w.fresh("vm"); name != "" {
		w.do("vm", name, "create", created, func(o *thing) error {
			s := spec(name)
			s.Driver = qemu.Name
			r, err := w.node.Create(ctx, s)
			seen(o, r)
			return err
		})
	}
}

func (w *worker) run(ctx context.Context) {
	if name := w.fresh("vm"); name != "" {
		w.do("vm", name, "run", running, func(o *thing) error {
			r, err := w.node.Launch(ctx, spec(name))
			seen(o, r)
			return err
		}, created)
	}
}

func (w *worker) hibernate(ctx context.Context) {
	if name := w.pick("vm", running); name != "" {
		w.do("vm", name, "hibernate", hibernated, func(*thing) error {
			_, err := w.node.Hibernate(ctx, name, "")
			return err
		})
	}
}

func (w *worker) wake(ctx context.Context) {
	if name := w.pick("vm", hibernated); name != "" {
		w.do("vm", name, "wake", running, func(*thing) error {
			_, err := w.node.Wake(ctx, name)
			return err
		})
	}
}

func (w *worker) stop(ctx context.Context) {
	if name := w.pick("vm", running); name != "" {
		w.do("vm", name, "stop", stopped, func(*thing) error {
			_, err := w.node.Stop(ctx, name, 0)
			return err
		})
	}
}

func (w *worker) remove(ctx context.Context) {
	if name := w.pick("vm", created, running, stopped, hibernated); name != "" {
		w.do("vm", name, "rm", gone, func(*thing) error { return w.node.Remove(ctx, name, true) })
	}
}

func (w *worker) save(ctx context.Context) {
	from := w.pick("vm", running, stopped)
	if name := w.fresh("snapshot"); name != "" && from != "" {
		w.do("snapshot", name, "save", there, func(*thing) error {
			_, err := w.node.SaveSnapshot(ctx, from, vm.SaveSpec{Name: name})
			return err
		})
	}
}

func (w *worker) clone(ctx context.Context) {
	from := w.pick("snapshot", there)
	if name := w.fresh("vm"); name != "" && from != "" {
		w.do("vm", name, "clone of "+from, running, func(o *thing) error {
			r, err := w.node.Clone(ctx, vm.CloneSpec{Snapshot: from, Name: name, NICs: []vm.NICSpec{{}}})
			seen(o, r)
			return err
		}, created)
	}
}

func (w *worker) removeSnapshot(ctx context.Context) {
	if name := w.pick("snapshot", there); name != "" {
		w.do("snapshot", name, "rm", gone, func(*thing) error { return w.node.RemoveSnapshot(ctx, name) })
	}
}

// importImage imports a small disk with unique content.
func (w *worker) importImage(ctx context.Context) {
	if name := w.fresh("image"); name != "" {
		w.do("image", name, "import", there, func(o *thing) error {
			disk := make([]byte, 64<<10)
			for i := range disk {
				disk[i] = byte(w.random.Uint32())
			}
			clear(disk[446:510])
			disk[510], disk[511] = 0x55, 0xaa
			o.content = fmt.Sprintf("%x", sha256.Sum256(disk))
			_, err := w.node.ImportImage(ctx, name, bytes.NewReader(disk), nil)
			return err
		})
	}
}

func (w *worker) removeImage(ctx context.Context) {
	if name := w.pick("image", there); name != "" {
		w.do("image", name, "rm", gone, func(*thing) error { return w.node.RemoveImage(ctx, name) })
	}
}
