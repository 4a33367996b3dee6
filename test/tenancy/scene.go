package tenancy

import (
	"slices"

	"cocoonstack.io/cocoon/api/contract"
)

// Stage is a node, its cluster and its registry, as the operator and the pod authors use them. Failures end the test.
type Stage interface {
	// Pods creates pods and waits until they are ready. Hibernate waits until their VMs are hibernated in the registry, Delete
	// until they are gone.
	Pods(...Victim)
	Hibernate(...Victim)
	Delete(...Victim)
	// Launch creates VMs by hand.
	Launch(...ByHand)
	// Save saves a VM of the operator as a snapshot, published to the given namespaces. Rest saves it and ends it.
	Save(vm, snapshot string, labels map[string]string, published ...string)
	Rest(vm, snapshot string)
	// Push pushes a snapshot on the node, of a namespace or the operator, to a repository and tag.
	Push(namespace, snapshot, to string)
	// Forget removes a snapshot of the operator from the node.
	Forget(snapshot string)
	// Export copies a snapshot into a folder: if listed, one that namespaces may clone from, else another one. Link makes a link
	// in the listed folder that points to where the node keeps the snapshot.
	Export(namespace, snapshot string, listed bool)
	Link(namespace, snapshot string)
	// Image pushes a private image of w to a registry and makes the node pull it for w. Everybody may read the image of Public.
	Image(w Whose)
	// Object creates a ConfigMap and a Secret in a namespace.
	Object(namespace, name string)
}

// Victim is a pod whose guest remembers a secret.
type Victim struct {
	Namespace, Name, Secret string
	Annotations             map[string]string
}

func (v Victim) String() string { return v.Namespace + "/" + v.Name }

// ByHand is a VM without a pod: of a namespace, or, for "", of the operator, who offers it to the namespaces in Offered.
type ByHand struct {
	Namespace, Name, Secret string
	Labels                  map[string]string
	Offered                 []string
}

// Build creates on s everything that the cells name. quick adds what earlier releases left.
func Build(s Stage, quick bool) {
	var up, naps, asleep, saved []Victim
	var made []ByHand
	for _, w := range []Whose{Own, Foreign} {
		ns := w.prefix()
		pod := func(name string, asks map[string]string) Victim { return Victim{ns, name, w.Secret(), asks} }
		up = append(up, pod("db", run(contract.KeyOfferFork, "true")))
		naps = append(naps, pod("nap", run()))
		names := []string{"gone", "asleep"}
		if quick {
			names = append(names, "asleep-2", "asleep-3")
		}
		for _, name := range names {
			asleep = append(asleep, pod(name, managed(contract.KeyMode, "run")))
		}
		saved = append(saved, pod("saved", run(contract.KeySnapshotPolicy, "always")))
		made = append(made, ByHand{ns, ns + "-hand", w.Secret(), nil, nil})
	}
	for _, w := range []Whose{Operators, Public} {
		for _, name := range []string{"db", "hand", "nap"} {
			made = append(made, ByHand{"", w.VM(name), w.Secret(), nil, w.to()})
		}
	}
	if quick {
		made = append(made, left()...)
	}
	s.Pods(slices.Concat(up, naps, asleep, saved)...)
	s.Launch(made...)
	s.Hibernate(slices.Concat(naps, asleep)...)
	s.Delete(slices.Concat(asleep, saved)...)
	for _, w := range []Whose{Own, Foreign} {
		ns, fork := w.prefix(), "fork-"+w.VM("db")
		s.Push(ns, fork, ns+"/app:1")
		s.Export(ns, fork, true)
		s.Link(ns, fork)
		s.Object(ns, ns+"-keys")
	}
	for _, w := range Columns {
		s.Image(w)
	}
	for _, w := range Columns { // all of one VM, whatever they are named
		s.Push(Dev, "fork-"+Own.VM("db"), Dev+"/vk-dev-far-"+w.prefix()+":fork")
	}
	// What a namespace pushes names that namespace as its owner, wherever it is: not even a mistake of the operator gives it away.
	s.Push(Prod, "fork-"+Foreign.VM("db"), Dev+"/stray:1")
	for _, w := range []Whose{Operators, Public} {
		s.Rest(w.VM("nap"), w.VM("nap")+":hibernate")
		s.Save(w.VM("db"), w.VM("saved"), nil, w.to()...)
		s.Save(w.VM("db"), "fork-"+w.VM("db"), nil, w.to()...)
		s.Export("", "fork-"+w.VM("db"), w == Public)
		s.Link("", "fork-"+w.VM("db"))
		for _, ref := range []string{w.prefix() + "/app:1", w.prefix() + "/" + w.VM("saved") + ":latest", w.VM("gone") + ":hibernate", w.VM("asleep") + ":hibernate", w.VM("db") + ":fork"} {
			s.Push("", w.VM("saved"), ref)
		}
	}
	if !quick {
		return
	}
	for name, of := range map[string]map[string]string{
		"vk-dev-flat:latest": older(Dev, "flat"), "vk-prod-flat:latest": older(Prod, "flat"), "vk-dev-eu-flat:latest": older(Rival, "flat"),
		"vk-dev-bare:latest": nil, "op-flat:latest": nil, "pub-flat:latest": nil,
		"vk-dev-eu-asleep:hibernate": older(Rival, "asleep"), "vk-dev-eu-asleep-2:hibernate": older(Rival, "asleep-2"),
		"vk-dev-bare:hibernate": nil, "vk-dev-bare-2:hibernate": nil,
	} {
		s.Save("op-db", "moved", of)
		s.Push("", "moved", name)
		s.Forget("moved")
	}
}

// to returns the namespaces that w shares with.
func (w Whose) to() []string {
	if w == Public {
		return []string{Dev}
	}
	return nil
}

// older returns the labels that an earlier release set on objects of a pod.
func older(namespace, pod string) map[string]string {
	return map[string]string{contract.VMLabelPodNamespace: namespace, contract.VMLabelPodName: pod, contract.VMLabelPodUID: "of-" + pod, contract.VMLabelNode: NodeName}
}

// left returns VMs of deleted pods, some with names of earlier releases, and some VMs made by hand.
func left() []ByHand {
	all := []ByHand{
		{Rival, "vk-dev-eu-run", Foreign.Secret(), older(Rival, "run"), nil},
		{Rival, "vk-dev-eu-main", Foreign.Secret(), older(Rival, "main"), nil},
		{Rival, "vk-dev-eu-left", Foreign.Secret(), older(Rival, "left"), nil},
		{Dev, "vk-dev-left", Own.Secret(), older(Dev, "left"), nil},
		{"", "vk-dev-made", Operators.Secret(), nil, nil},
		{"", "vk-dev-offered", Public.Secret(), nil, []string{Dev}},
	}
	for _, w := range Columns {
		ns := ""
		if w == Own || w == Foreign {
			ns = w.prefix()
		}
		all = append(all, ByHand{ns, w.prefix() + "-found", w.Secret(), nil, w.to()})
	}
	return all
}

// NodeName is the name of the node.
const NodeName = "node-1"

// PublicRepositories are the repositories that the node's operator shares with everybody, as set in vk-cocoon. The states of
// VMs are never shared, even if they are listed here.
const PublicRepositories = "pub/,pub-gone,pub-asleep,pub-db,pub-flat"
