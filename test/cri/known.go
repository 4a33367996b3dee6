package cri

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
)

// excuse says why containerd itself does not pass specs where the tests run.
type excuse struct {
	specs *regexp.Regexp // their whole names
	state State
	why   string
}

// excuses are all that count. Specs for SELinux do not exist where the kernel does not enforce it, and benchmarks are none.
var excuses = []excuse{
	{regexp.MustCompile(`^AppArmor `), Skipped, "the kernel has no AppArmor"},
	{
		regexp.MustCompile(`^Image Manager public image with digest should be pulled and removed`), Failed,
		"it names the digest of an image of others, which an image of ours cannot have, and their registry is not asked",
	},
	{regexp.MustCompile(`^SELinux `), Skipped, "the kernel does not enforce SELinux"},
}

// cannot say why VM pods do not pass specs, beside excuses. docs/cri.md has the same list.
var cannot = []excuse{
	{regexp.MustCompile(`HostIpc is true|HostNetwork is true|support HostPID|portforward in host network`), Failed, "a VM has a kernel of its own, and no namespace of the node"},
	{regexp.MustCompile(`^Container Mount Propagation .*(rshared|rslave)`), Failed, "mounts do not propagate between two kernels"},
	{regexp.MustCompile(`should support (non-)?recursive readonly mounts`), Failed, "the test removes the folder on the node while the pod still has what is mounted in it"},
	{regexp.MustCompile(`^Security Context UserNamespaces .*NamespaceMode_POD`), Failed, "the test looks for the mapping in the guest, which needs none"},
}

// unexcused returns the specs of a score that did not pass without an excuse, one line each.
func unexcused(score map[string]Outcome, excuses []excuse) []string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(score)) {
		o := score[name]
		if o.State != Passed && !slices.ContainsFunc(excuses, func(e excuse) bool { return e.state == o.State && e.specs.MatchString(name) }) {
			all = append(all, fmt.Sprintf("%s: %s: %s", name, o.State, o.Why))
		}
	}
	return all
}
