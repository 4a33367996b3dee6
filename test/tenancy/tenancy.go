// Package tenancy is the table of what a pod of one namespace may name, whose that is, and what becomes of the pod, with the
// admission webhooks in front of the node and without them. Its tests run every cell: in one process, and on a whole cluster.
//
// It is for tests only, and starts nothing by itself.
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

// The namespaces: whose pods the cells are, who is named, and one whose name begins as the first one's does, so that what earlier
// releases called by namespace and pod is ambiguous.
const (
	Dev   = "dev"
	Prod  = "prod"
	Rival = "dev-eu"
)

// Whose says to whom belongs what a cell names.
type Whose int

// The columns of the table.
const (
	Own       Whose = iota // the pod's namespace
	Foreign                // another namespace
	Operators              // the operator of the node, who shares it with nobody
	Public                 // the operator, who shares it with the pod's namespace
)

// Columns are all of them.
var Columns = []Whose{Own, Foreign, Operators, Public}

func (w Whose) String() string { return [...]string{"own", "foreign", "operator", "public"}[w] }

// prefix begins the names of what belongs to w.
func (w Whose) prefix() string { return [...]string{Dev, Prod, "op", "pub"}[w] }

// Secret is what the guests of w remember.
func (w Whose) Secret() string { return "the secret of " + w.prefix() }

// VM is how the VM of w is called that the table calls thing: as that of a pod, where w is a namespace.
func (w Whose) VM(thing string) string {
	if w == Own || w == Foreign {
		return contract.VMName(w.prefix(), thing)
	}
	return w.prefix() + "-" + thing
}

// State is what becomes of a pod that is admitted.
type State string

// The states.
const (
	Boots  State = "boots"   // its VM runs, and remembers nothing
	GoesOn State = "goes on" // its VM runs, and remembers the secret of whom Outcome.Of says
	Sleeps State = "sleeps"  // its VM hibernates
	Stands State = "stands"  // it runs, for a machine that is not the node's
	Waits  State = "waits"   // its container waits
	Fails  State = "fails"   // it has failed
)

// Outcome is what a node does with a pod.
type Outcome struct {
	State  State
	Of     Whose  // GoesOn: whose memory it has
	Reason string // Waits, Fails
	Says   string // Waits, Fails: in the message
}

func (o Outcome) String() string {
	switch o.State {
	case GoesOn:
		return fmt.Sprintf("goes on with %q", o.Of.Secret())
	case Waits, Fails:
		return fmt.Sprintf("%s, %s, %q", o.State, o.Reason, o.Says)
	case Boots, Sleeps, Stands:
	}
	return string(o.State)
}

// Cell is what becomes of a pod that names something of one owner.
type Cell struct {
	None    string // why nothing such can be named; the rest is empty then
	Refused string // what admission says to refuse the pod; "": it admits it
	Node    Outcome
	Later   *Outcome // after the node has started anew; nil: as before
}

// Row is one way to name something.
type Row struct {
	Name  string
	Ask   map[string]string        // annotations
	On    map[string]string        // labels
	Image string                   // of the container; "": the one that everybody may run
	Pods  map[Whose]string         // names of the pods, where these say what is meant
	More  func(*corev1.Pod, Whose) // whatever else is said
	Forms []string                 // what of api/contract it decides beside the keys of Ask and On
	Takes []string                 // what its public cell uses up
	Quick string                   // why the cluster does not run it; "": it does
	Cells [4]Cell
}

// Case is one cell that is run.
type Case struct {
	Row   *Row
	Whose Whose
	Cell  Cell
}

func (c Case) String() string { return c.Row.Name + "/" + c.Whose.String() }

// Cases are the cells that there are.
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

// PodName is how the pod of the case is called.
func (c Case) PodName() string {
	if name := c.Row.Pods[c.Whose]; name != "" {
		return name
	}
	name := notName.ReplaceAllString(strings.ToLower(c.Row.Name), "-")
	return strings.Trim(name, "-") + "-" + c.Whose.String()
}

// Lookup is what of a thing is known only when it is there: its id, its folder, its address.
type Lookup func(w Whose, kind, thing string) string

// Pod is the pod of the case, for a node of that name with an image that everybody may run.
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

// expand fills in a text: {ns} is the namespace of w, {plain:x} a name of w's that is no pod's, {x} the VM of w's that the table
// calls x, and {kind:x} what find knows of it.
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
