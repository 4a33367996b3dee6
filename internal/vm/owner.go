package vm

import (
	"context"
	"slices"
)

// Owner says who owns a VM or a snapshot. The zero value is the operator of the node.
//
// Namespace is the boundary: engine and stores compare it where an object is stored, and report objects of another namespace as
// NotFound. The UIDs name the Kubernetes objects it was made for; they are kept and shown, but restrict nothing.
type Owner struct {
	Namespace string `json:"namespace,omitempty"`
	PodUID    string `json:"pod_uid,omitempty"`
	SetUID    string `json:"set_uid,omitempty"` // of the controller of the pod: a CocoonSet, a VirtualMachine, a StatefulSet
}

// Everyone stands for all namespaces in a list of namespaces.
const Everyone = "*"

// Operator reports whether o is the operator of the node.
func (o Owner) Operator() bool { return o.Namespace == "" }

// Reaches reports whether a request on behalf of o may use objects of owner of: the operator all, a namespace its own.
func (o Owner) Reaches(of Owner) bool { return o.Operator() || o.Namespace == of.Namespace }

// Invited reports whether o may use what the operator shares with these namespaces.
func (o Owner) Invited(namespaces []string) bool {
	return slices.Contains(namespaces, Everyone) || !o.Operator() && slices.Contains(namespaces, o.Namespace)
}

// MayAdopt reports whether a pod of o may take over a VM that was made for no pod. It may if the VM belongs to its namespace, or if
// the operator offers the VM to the namespace.
func (o Owner) MayAdopt(of Owner, offered []string) bool {
	return of.Namespace == o.Namespace || of.Operator() && o.Invited(offered)
}

// Qualify returns the node-wide unique form of name: NAMESPACE/NAME, or only the name for an object of the operator.
func (o Owner) Qualify(name string) string {
	if o.Operator() {
		return name
	}
	return o.Namespace + "/" + name
}

// Heir returns the owner of what a request makes from an object of owner of: on whose behalf it is made, or of for the operator.
func Heir(ctx context.Context, of Owner) Owner {
	if who := Behalf(ctx); !who.Operator() {
		return who
	}
	return of
}

type behalfKey struct{}

// OnBehalf returns a context whose requests are made for o. A door calls it once per request; the node API carries it.
func OnBehalf(ctx context.Context, o Owner) context.Context {
	return context.WithValue(ctx, behalfKey{}, o)
}

// Behalf returns on whose behalf a request is made: the operator, unless OnBehalf set another owner.
func Behalf(ctx context.Context) Owner {
	o, _ := ctx.Value(behalfKey{}).(Owner)
	return o
}
