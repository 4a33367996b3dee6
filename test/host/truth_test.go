//go:build host

package host

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// States of an object other than a VM: it exists, or it does not. The others are vm.State.
const (
	gone  = "gone"
	there = "there"

	created    = string(vm.StateCreated)
	running    = string(vm.StateRunning)
	stopped    = string(vm.StateStopped)
	hibernated = string(vm.StateHibernated)
)

// afterCut returns the states after a power cut: running VMs have ended.
func afterCut(states []string) []string {
	out := slices.Clone(states)
	for i, s := range out {
		if s == running {
			out[i] = stopped
		}
	}
	return out
}

// thing is a VM, a snapshot or an image, in the state that the answers to the verbs reported.
type thing struct {
	kind, name string
	may        []string // the state that it is in; while a verb runs, also those that the verb may lead to
	verb       string   // the last one, or the one that runs
	answered   time.Time

	id      string
	address string // MAC and IP of a VM's interfaces
	content string // digest of an image
	secret  string // that a guest has in its memory
}

// truth holds what a node has acknowledged, in a place that no power cut reaches.
type truth struct {
	mu     sync.Mutex
	things map[string]*thing // by kind and name
}

func newTruth() *truth { return &truth{things: map[string]*thing{}} }

func (x *truth) key(kind, name string) string { return kind + " " + name }

// begin records that a verb has started. From then on the object may be in its old state or any of after.
func (x *truth) begin(kind, name, verb string, after ...string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o := x.things[x.key(kind, name)]
	if o == nil {
		o = &thing{kind: kind, name: name, may: []string{gone}}
		x.things[x.key(kind, name)] = o
	}
	o.verb, o.answered = verb, time.Time{}
	o.may = append(slices.Clone(o.may), after...)
}

// answer records that the running verb has succeeded: the object is in state, and change adds the other known facts.
func (x *truth) answer(kind, name, state string, change func(*thing)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o := x.things[x.key(kind, name)]
	o.may, o.answered = []string{state}, time.Now()
	if change != nil {
		change(o)
	}
	if state == gone {
		o.id, o.address = "", ""
	}
}

// settle takes the states found after a power cut as acknowledged, and forgets removed objects: their names are not used again.
func (x *truth) settle(found map[string]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for key := range x.things {
		if _, ok := found[key]; !ok {
			delete(x.things, key)
		}
	}
	for key, state := range found {
		if x.things[key] == nil {
			kind, name, _ := strings.Cut(key, " ")
			x.things[key] = &thing{kind: kind, name: name}
		}
		x.things[key].may = []string{state}
	}
}

// all returns copies of the things of a kind, sorted by name.
func (x *truth) all(kind string) []thing {
	x.mu.Lock()
	defer x.mu.Unlock()
	var list []thing
	for _, key := range slices.Sorted(maps.Keys(x.things)) {
		if o := x.things[key]; o.kind == kind {
			list = append(list, *o)
		}
	}
	return list
}

// fault says how the state that was found contradicts o, or "".
func (o thing) fault(state string, cut time.Time) string {
	may := afterCut(o.may)
	if slices.Contains(may, state) {
		return ""
	}
	when := "which was under way"
	if !o.answered.IsZero() {
		when = fmt.Sprintf("which had answered %s before", cut.Sub(o.answered).Round(time.Millisecond))
	}
	return fmt.Sprintf("%s %s is %s instead of %s; its last verb was %s, %s", o.kind, o.name, state, strings.Join(may, " or "), o.verb, when)
}
