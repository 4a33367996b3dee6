// Package tenancy is a table of what a pod of one namespace may name, who owns it, and what happens to the pod, with and without
// the admission webhooks in front of the node. Its tests run every cell: in one process, and on a whole cluster.
//
// It is only for tests, and starts nothing by itself.
package tenancy

import (
	"fmt"
	"maps"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// The namespaces: the one of the cells' pods, the one that they name, and one that starts with the first one's name. The third
// makes names of earlier releases, built from namespace and pod, ambiguous.
const (
	Dev   = "dev"
	Prod  = "prod"
	Rival = "dev-eu"
)

// Whose says who owns what a cell names.
type Whose int

// The columns of the table.
const (
	Own       Whose = iota // the pod's namespace
	Foreign                // another namespace
	Operators              // the operator of the node, who shares it with nobody
	Public                 // the operator, who shares it with the pod's namespace
)

// Columns lists all columns.
var Columns = []Whose{Own, Foreign, Operators, Public}

func (w Whose) String() string { return [...]string{"own", "foreign", "operator", "public"}[w] }

// prefix is the prefix of the names of what belongs to w.
func (w Whose) prefix() string { return [...]string{Dev, Prod, "op", "pub"}[w] }

// Secret is the secret in the guests of w.
func (w Whose) Secret() string { return "the secret of " + w.prefix() }

// VM is the name of the VM of w that the table calls thing: the name of a pod's VM if w is a namespace.
func (w Whose) VM(thing string) string {
	if w == Own || w == Foreign {
		return contract.VMName(w.prefix(), thing)
	}
	return w.prefix() + "-" + thing
}

// State is the final state of an admitted pod.
type State string

// The states.
const (
	Boots  State = "boots"   // its VM runs without a secret
	GoesOn State = "goes on" // its VM runs and has the secret of the owner in Outcome.Of
	Sleeps State = "sleeps"  // its VM hibernates
	Stands State = "stands"  // it runs, for a machine that does not belong to the node
	Waits  State = "waits"   // its container waits
)

// Outcome is what a node does with a pod.
type Outcome struct {
	State  State
	Of     Whose  // GoesOn: whose memory it resumes with
	Reason string // Waits: of the pod if it has one, else of the container
	Says   string // Waits: part of the message
}

func (o Outcome) String() string {
	switch o.State {
	case GoesOn:
		return fmt.Sprintf("goes on with %q", o.Of.Secret())
	case Waits:
		return fmt.Sprintf("%s, %s, %q", o.State, o.Reason, o.Says)
	case Boots, Sleeps, Stands:
	}
	return string(o.State)
}

// Cell is what happens to a pod that names something of one owner.
type Cell struct {
	None    string // why nothing like this can be named; the rest is empty then
	Refused string // message with which admission refuses the pod; "": it admits it
	Node    Outcome
	Later   *Outcome // after a restart of the node; nil: as before
}

// Row is one way to name something.
type Row struct {
	Name  string
	Ask   map[string]string        // annotations
	On    map[string]string        // labels
	Image string                   // of the container; "": the one that every namespace may run
	Pods  map[Whose]string         // names of the pods, if they decide what is named
	More  func(*corev1.Pod, Whose) // other fields
	Forms []string                 // the parts of api/contract that the row covers in addition to the keys of Ask and On
	Takes []string                 // what its public cell consumes
	Quick string                   // why the cluster does not run it; "": it does
	Cells [4]Cell
}

// Case is one cell to run.
type Case struct {
	Row   *Row
	Whose Whose
	Cell  Cell
}

func (c Case) String() string { return c.Row.Name + "/" + c.Whose.String() }

// Cases returns all cells that are not empty.
func Cases() (all []Case) {
	for i := range rows {
		for _, w := range Columns {
			if c := rows[i].Cells[w]; c.None == "" {
				all = append(all, Case{&rows[i], w, c})
			}
		}
	}
	return all
}

var notName = regexp.MustCompile(`[^a-z0-9]+`)

// PodName is the name of the case's pod.
func (c Case) PodName() string {
	if name := c.Row.Pods[c.Whose]; name != "" {
		return name
	}
	name := notName.ReplaceAllString(strings.ToLower(c.Row.Name), "-")
	return strings.Trim(name, "-") + "-" + c.Whose.String()
}

// Lookup returns facts that are known only once a thing exists: its id, its folder, its address.
type Lookup func(w Whose, kind, thing string) string

// Pod is the pod of the case, with the given image, which every namespace may run.
func (c Case) Pod(image string, find Lookup) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Dev, Name: c.PodName(), Annotations: map[string]string{}, Labels: maps.Clone(c.Row.On)},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(1)),
			NodeSelector:                  map[string]string{contract.LabelPool: "default"},
			Tolerations:                   []corev1.Toleration{{Key: contract.TaintKey, Operator: corev1.TolerationOpExists}},
			Containers:                    []corev1.Container{{Name: "c", Image: image, ImagePullPolicy: corev1.PullIfNotPresent}},
		},
	}
	for key, value := range c.Row.Ask {
		p.Annotations[key] = c.Whose.expand(value, find)
	}
	for key, value := range p.Labels {
		p.Labels[key] = c.Whose.expand(value, find)
	}
	if c.Row.Image != "" {
		p.Spec.Containers[0].Image = c.Whose.expand(c.Row.Image, find)
	}
	if c.Row.More != nil {
		c.Row.More(p, c.Whose)
	}
	return p
}

var holder = regexp.MustCompile(`\{(?:([a-z]+):)?([a-z0-9-]+)\}`)

// expand replaces placeholders in a text: {ns} is the namespace of w, {plain:x} a name of w that is not a pod's, {x} the VM of w
// that the table calls x, and {kind:x} what find returns for it.
func (w Whose) expand(text string, find Lookup) string {
	return holder.ReplaceAllStringFunc(text, func(m string) string {
		part := holder.FindStringSubmatch(m)
		switch kind, thing := part[1], part[2]; {
		case kind == "" && thing == "ns":
			return w.prefix()
		case kind == "":
			return w.VM(thing)
		case kind == "plain":
			return w.prefix() + "-" + thing
		default:
			return find(w, kind, thing)
		}
	})
}
