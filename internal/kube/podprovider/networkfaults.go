package podprovider

import (
	"maps"
	"slices"
	"strings"
)

// networkFaults says why the VM does not have the networks of its pod.
type networkFaults struct {
	wrong string            // of the annotation
	why   map[string]string // by network
}

// settle forgets the faults of networks about which nothing is left to do.
func (f *networkFaults) settle(wrong string, open []string) {
	f.wrong = wrong
	maps.DeleteFunc(f.why, func(name, _ string) bool { return !slices.Contains(open, name) })
}

func (f *networkFaults) done(network string) { delete(f.why, network) }

func (f *networkFaults) fail(network, why string) {
	if f.why == nil {
		f.why = map[string]string{}
	}
	f.why[network] = why
}

// text is the message of the condition; "" if nothing is wrong.
func (f *networkFaults) text() string {
	if f.wrong != "" {
		return "No network is attached or detached: " + f.wrong
	}
	var all []string
	for _, name := range slices.Sorted(maps.Keys(f.why)) {
		all = append(all, f.why[name])
	}
	return strings.Join(all, "; ")
}
