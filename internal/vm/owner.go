package vm

import (
	"context"
	"slices"
)

// Owner says whose a VM or a snapshot is. The zero value is the operator of the node.
//
// Namespace is the boundary: engine and stores compare it where an object is stored, and what belongs to another namespace
// is NotFound. The UIDs say for which object it was made; they are kept and shown, and they bound nothing.
type Owner struct {
	Namespace string `json:"namespace,omitempty"`
	PodUID    string `json:"pod_uid,omitempty"`
	SetUID    string `json:"set_uid,omitempty"` // of what controls the pod: a CocoonSet, a VirtualMachine, a StatefulSet
}

// Everyone is the member of a list of namespaces that stands for all of them.
const Everyone = "*"

// Operator reports whether o is the operator of the node.
func (o Owner) Operator() bool { return o.Namespace == "" }

// Reaches reports whether a request on behalf of o may use what belongs to of: the operator everything, a namespace its own.
func (o Owner) Reaches(of Owner) bool { return o.Operator() || o.Namespace == of.Namespace }

// Invited reports whether what the operator shares with these namespaces is shared with o.
func (o Owner) Invited(namespaces []string) bool {
	return slices.Contains(namespaces, Everyone) || !o.Operator() && slices.Contains(namespaces, o.Namespace)
}

// Qualify is name as it is unique on a node: NAMESPACE/NAME, or the name alone of what is the operator's.
func (o Owner) Qualify(name string) string {
	if o.Operator() {
		return name
	}
	return o.Namespace + "/" + name
}

type behalfKey struct{}

// OnBehalf returns a context whose requests are made for o. A door calls it once for each request; the node API carries it.
func OnBehalf(ctx context.Context, o Owner) context.Context {
	return context.WithValue(ctx, behalfKey{}, o)
}

// Behalf is for whom a request is made: the operator, unless OnBehalf named somebody else.
func Behalf(ctx context.Context) Owner {
	o, _ := ctx.Value(behalfKey{}).(Owner)
	return o
}
