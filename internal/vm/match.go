package vm

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Named is an object that a reference can match.
type Named struct {
	ID     ID
	Name   string
	Owner  Owner
	Shared []string // namespaces that may use it, if its owner is the operator
}

// VisibleTo reports whether who may know of n: its owner, the operator, and those with whom the operator shares it.
func (n Named) VisibleTo(who Owner) bool {
	return who.Reaches(n.Owner) || n.Owner.Operator() && who.Invited(n.Shared)
}

// Compare orders objects by owner and name.
func (n Named) Compare(other Named) int {
	return cmp.Or(cmp.Compare(n.Owner.Namespace, other.Owner.Namespace), cmp.Compare(n.Name, other.Name))
}

// Is reports whether ref refers to n: by id, by name with or without the namespace, or by the beginning of the id.
func (n Named) Is(ref string) bool {
	return string(n.ID) == ref || n.Name == ref || n.Owner.Qualify(n.Name) == ref || len(ref) >= MinPrefixLength && strings.HasPrefix(string(n.ID), ref)
}

// Kind describes the kind of object that a reference names, for messages.
type Kind struct {
	Noun   string // e.g. "VM"
	List   string // command that lists the existing objects
	Remove string // command that removes one
}

// The kinds that programs refer to. Programs that run the CLI tell failures apart by the words of Missing and Taken, which
// are public API (docs/compat.md).
var (
	VMs             = Kind{Noun: "VM", List: "cocoon vm list", Remove: "cocoon vm rm"}
	Snapshots       = Kind{Noun: "snapshot", List: "cocoon snapshot list", Remove: "cocoon snapshot rm"}
	Volumes         = Kind{Noun: "volume", List: "cocoon volume list", Remove: "cocoon volume rm"}
	VolumeSnapshots = Kind{Noun: "volume snapshot", List: "cocoon volume snapshot list", Remove: "cocoon volume snapshot rm"}
)

// Match resolves ref on behalf of who. It tries a full id, then a name, then a unique prefix of an id with at least
// MinPrefixLength characters. Objects of who win over other visible ones of the same name; NAMESPACE/NAME chooses among
// several. It returns NotFound when nothing visible to who matches, and InvalidArgument when ref is ambiguous.
func (k Kind) Match(who Owner, ref string, all iter.Seq[Named]) (ID, error) {
	var own ID
	var names, prefixes []Named
	for n := range all {
		switch {
		case !n.VisibleTo(who):
		case string(n.ID) == ref:
			return n.ID, nil
		case n.Name == ref && n.Owner.Namespace == who.Namespace, !n.Owner.Operator() && n.Owner.Qualify(n.Name) == ref:
			own = n.ID
		case n.Name == ref:
			names = append(names, n)
		case len(ref) >= MinPrefixLength && strings.HasPrefix(string(n.ID), ref):
			prefixes = append(prefixes, n)
		}
	}
	switch {
	case own != "":
		return own, nil
	case len(names) == 1:
		return names[0].ID, nil
	case len(names) > 1:
		var all []string
		for _, n := range names {
			all = append(all, n.Owner.Qualify(n.Name))
		}
		slices.Sort(all)
		return "", errdefs.Invalidf("%d %ss have the name %q; use one of %s", len(names), k.Noun, ref, strings.Join(all, ", "))
	case len(prefixes) == 1:
		return prefixes[0].ID, nil
	case len(prefixes) > 1:
		return "", errdefs.Invalidf("%q matches %d %ss; use more characters of the id", ref, len(prefixes), k.Noun)
	}
	return "", k.Missing(who, ref)
}

// Missing returns the NotFound error for ref, which who referred to.
func (k Kind) Missing(who Owner, ref string) error {
	where := ""
	if !who.Operator() {
		where = fmt.Sprintf(" in namespace %s", who.Namespace)
	}
	return errdefs.NotFoundf("%s not found: %q%s; `%s` lists those that exist", strings.ToLower(k.Noun), ref, where, k.List)
}

// Taken returns the AlreadyExists error for a name, given with its namespace.
func (k Kind) Taken(name string) error {
	return errdefs.Existsf("a %s called %q already exists; choose another name, or remove it with `%s %s`", k.Noun, name, k.Remove, name)
}
