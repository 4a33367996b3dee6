package tenancy

import "cocoonstack.io/cocoon/api/contract"

// Stage is a node, its cluster and its registry, as the operator and the authors of pods use them. Failures end the test.
type Stage interface {
	// Pod makes a pod of a namespace whose guest remembers a secret, and waits until it is ready.
	Pod(namespace, name, secret string, annotations map[string]string)
	// Hibernate waits until the pod's VM sleeps in the registry; Delete until the pod is gone.
	Hibernate(namespace, name string)
	Delete(namespace, name string)
	// Launch makes a VM by hand, of a namespace or, for "", of the operator's, who offers it to those.
	Launch(namespace, name, secret string, labels map[string]string, offered ...string)
	// Save saves a VM of the operator's as a snapshot, which is published to those. Rest saves it and ends it.
	Save(vm, snapshot string, labels map[string]string, published ...string)
	Rest(vm, snapshot string)
	// Push sends a snapshot of the node, of a namespace or the operator's, to a repository and tag.
	Push(namespace, snapshot, to string)
	// Forget removes a snapshot of the operator's from the node.
	Forget(snapshot string)
	// Export copies a snapshot into a folder, in one that namespaces may clone from or beside it. Link makes a link in the
	// former that leads to where the node keeps the snapshot.
	Export(namespace, snapshot string, listed bool)
	Link(namespace, snapshot string)
	// Object makes a ConfigMap and a Secret of a namespace.
	Object(namespace, name string)
}

// Build puts on s what the cells name. quick says that what earlier releases left is there too.
func Build(s Stage, quick bool) {
	for _, w := range []Whose{Own, Foreign} {
		ns := w.prefix()
		s.Pod(ns, "db", w.Secret(), run(contract.KeyOfferFork, "true"))
		s.Pod(ns, "nap", w.Secret(), run())
		s.Hibernate(ns, "nap")
		asleep := []string{"gone", "asleep"}
		if quick {
			asleep = append(asleep, "asleep-2", "asleep-3")
		}
		for _, name := range asleep {
			s.Pod(ns, name, w.Secret(), managed(contract.KeyMode, "run"))
			s.Hibernate(ns, name)
			s.Delete(ns, name)
		}
		s.Pod(ns, "saved", w.Secret(), run(contract.KeySnapshotPolicy, "always"))
		s.Delete(ns, "saved")
		s.Launch(ns, ns+"-hand", w.Secret(), nil)
		s.Push(ns, "fork-"+w.VM("db"), ns+"/app:1")
		s.Export(ns, "fork-"+w.VM("db"), true)
		s.Link(ns, "fork-"+w.VM("db"))
		s.Object(ns, ns+"-keys")
	}
	for _, w := range Columns { // of one VM, whichever is asked for
		s.Push(Dev, "fork-"+Own.VM("db"), Dev+"/vk-dev-far-"+w.prefix()+":fork")
	}
	// A namespace says of what it pushes whose it is, wherever it is: not even the operator's mistake gives it away.
	s.Push(Prod, "fork-"+Foreign.VM("db"), Dev+"/stray:1")
	for _, w := range []Whose{Operators, Public} {
		var to []string
		if w == Public {
			to = []string{Dev}
		}
		s.Launch("", w.VM("db"), w.Secret(), nil, to...)
		s.Launch("", w.VM("hand"), w.Secret(), nil, to...)
		s.Launch("", w.VM("nap"), w.Secret(), nil, to...)
		s.Rest(w.VM("nap"), w.VM("nap")+":hibernate")
		s.Save(w.VM("db"), w.VM("saved"), nil, to...)
		s.Save(w.VM("db"), "fork-"+w.VM("db"), nil, to...)
		s.Export("", "fork-"+w.VM("db"), w == Public)
		s.Link("", "fork-"+w.VM("db"))
		for _, ref := range []string{w.prefix() + "/app:1", w.prefix() + "/" + w.VM("saved") + ":latest", w.VM("gone") + ":hibernate", w.VM("asleep") + ":hibernate", w.VM("db") + ":fork"} {
			s.Push("", w.VM("saved"), ref)
		}
	}
	if quick {
		older := func(namespace, pod string) map[string]string {
			return map[string]string{contract.VMLabelPodNamespace: namespace, contract.VMLabelPodName: pod, contract.VMLabelPodUID: "of-" + pod, contract.VMLabelNode: NodeName}
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
		s.Launch(Rival, "vk-dev-eu-run", Foreign.Secret(), older(Rival, "run"))
		s.Launch(Rival, "vk-dev-eu-main", Foreign.Secret(), older(Rival, "main"))
		s.Launch(Rival, "vk-dev-eu-left", Foreign.Secret(), older(Rival, "left"))
		s.Launch(Dev, "vk-dev-left", Own.Secret(), older(Dev, "left"))
		s.Launch("", "vk-dev-made", Operators.Secret(), nil)
		s.Launch("", "vk-dev-offered", Public.Secret(), nil, Dev)
		for _, w := range Columns {
			ns := ""
			if w == Own || w == Foreign {
				ns = w.prefix()
			}
			var to []string
			if w == Public {
				to = []string{Dev}
			}
			s.Launch(ns, w.prefix()+"-found", w.Secret(), nil, to...)
		}
	}
}

// NodeName is the name of the node.
const NodeName = "node-1"

// PublicRepositories are those that the node's operator shares with everybody, as vk-cocoon is told of them. The states of VMs
// are nobody's to share, whatever is said here.
const PublicRepositories = "pub/,pub-gone,pub-asleep,pub-db,pub-flat"
