package contract

import (
	"regexp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Tags of a VM's snapshots in a registry; see Repository.
const (
	DefaultSnapshotTag   = "latest"    // taken before it was deleted
	HibernateSnapshotTag = "hibernate" // the VM as it is asleep; gone when it is awake again
	ForkSnapshotTag      = "fork"      // the VM as it ran once, for forks on other nodes; gone with the VM
)

// OwnerKind is the kind of the objects that own the pods of a CocoonSet.
const OwnerKind = "CocoonSet"

// The roles of a CocoonSet's pods (LabelSetRole).
const (
	RoleMain     = "main"
	RoleSubAgent = "sub-agent"
	RoleToolbox  = "toolbox"
)

// Member is what says which place a pod has in a CocoonSet.
type Member struct {
	Namespace string
	Labels    map[string]string
	Owners    []metav1.OwnerReference
}

// Set is the name of the CocoonSet that the pod belongs to, "" for none: that of an owner, else that of the label.
func (m Member) Set() string {
	for _, o := range m.Owners {
		if o.Kind == OwnerKind {
			return o.Name
		}
	}
	return m.Labels[LabelSetName]
}

// Main reports whether the VM of the pod is the main one of its set: slot 0, by the strict form of its name. A toolbox
// may be called 0-like things and is not, and neither is a pod that no set owns.
func (m Member) Main(vmName string) bool {
	if role := m.Labels[LabelSetRole]; role != "" && role != RoleMain {
		return false
	}
	set := m.Set()
	return set != "" && (vmName == VMName(m.Namespace, set+"-0") || vmName == OldVMName(m.Namespace, set+"-0"))
}

// ShouldSnapshotVM reports whether the policy of s has a VM saved before it is deleted; main says that it is the main one
// of its set. An empty policy is always.
func ShouldSnapshotVM(s VMSpec, main bool) bool {
	switch s.SnapshotPolicy {
	case SnapshotNever:
		return false
	case SnapshotMainOnly:
		return main
	case SnapshotAlways:
		return true
	}
	return true // nothing is lost that might have been wanted
}

// AsksSnapshot reports whether the annotations are those of a VM that snapshots are meant for at all: one that is managed,
// or whose policy is said. Any other pod is one as Kubernetes knows them, and what is in it goes with it.
func AsksSnapshot(annotations map[string]string) bool {
	return annotations[KeyManaged] == "true" || annotations[KeySnapshotPolicy] != ""
}

// RestoreFromHibernate reports whether the VM must go on from where it hibernated, and must not boot.
func RestoreFromHibernate(annotations map[string]string) bool {
	return annotations[KeyRestoreFromHibernate] == "true"
}

// KeepSnapshot reports whether this delete only gives up the seat on the node: nothing is saved, tags stay.
func KeepSnapshot(annotations map[string]string) bool { return annotations[KeyKeepSnapshot] == "true" }

// OfferFork reports whether the VM's state is to be in the registry for its forks.
func OfferFork(annotations map[string]string) bool { return annotations[KeyOfferFork] == "true" }

// SnapshotRef names a snapshot by repository and tag.
type SnapshotRef struct {
	Repo string
	Tag  string // never empty
}

// A repository is as the OCI distribution spec has it, and may have capitals: a snapshot that no registry knows may.
var (
	repoRE = regexp.MustCompile(`^[A-Za-z0-9]+((\.|_|__|-+)[A-Za-z0-9]+)*(/[A-Za-z0-9]+((\.|_|__|-+)[A-Za-z0-9]+)*)*$`)
	tagRE  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$`)
)

var pushableRE = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$`)

// Pushable reports whether a VM of that name can be saved to a registry, where its name is that of a repository.
func Pushable(vmName string) bool { return pushableRE.MatchString(vmName) }

const maxLocalName = 127 // characters of a snapshot's name on a node

// ParseSnapshotRef reads repo[:tag], the way in which a VM to clone is named. It is not for a registry's host, nor for a
// digest: the node knows its registry, and a digest is none of a snapshot's names. The error is a KeyError of KeyImage.
func ParseSnapshotRef(s string) (SnapshotRef, error) {
	bad := func(why string) (SnapshotRef, error) {
		return SnapshotRef{}, KeyError{Key: KeyImage, Value: s, Reason: why}
	}
	if strings.Contains(s, "@") {
		return bad("names a digest; a snapshot to clone is named repository[:tag]")
	}
	if strings.Contains(s, "://") {
		return bad("is a URL; a snapshot to clone is named repository[:tag], in the registry of the node")
	}
	repo, tag, tagged := strings.Cut(s, ":")
	switch {
	case strings.Contains(tag, "/"):
		return bad("names a host; a snapshot to clone is named repository[:tag], in the registry of the node")
	case !tagged:
		tag = DefaultSnapshotTag
	}
	ref := SnapshotRef{Repo: repo, Tag: tag}
	if !repoRE.MatchString(repo) || !tagRE.MatchString(tag) {
		return bad("is not a snapshot's name, such as team/base or base:v2")
	}
	if len(ref.Locals()[1]) > maxLocalName {
		return bad("is too long for a snapshot's name")
	}
	return ref, nil
}

// String is the ref as it is written, with its tag.
func (r SnapshotRef) String() string { return r.Repo + ":" + r.Tag }

// Local is the name of the snapshot on a node: repo:tag, or the bare repository when the tag is latest. Names there have
// no slashes; three underscores, which no repository may have, stand for one.
func (r SnapshotRef) Local() string {
	name := strings.ReplaceAll(r.Repo, "/", "___")
	if r.Tag != DefaultSnapshotTag {
		name += ":" + r.Tag
	}
	return name
}

// LocalSnapshotRef reads what Locals wrote. The error is a KeyError.
func LocalSnapshotRef(name string) (SnapshotRef, error) {
	return ParseSnapshotRef(strings.ReplaceAll(strings.Replace(name, second+":", ":", 1), "___", "/"))
}

// second marks the second name of a snapshot that has a tag. No repository ends so.
const second = "___"

// Locals are the two names that the snapshot may have on a node, so that a newer one can be there before the older one goes: the
// bare repository and repo:latest, or repo:tag and repo___:tag.
func (r SnapshotRef) Locals() []string {
	if r.Tag != DefaultSnapshotTag {
		return []string{r.Local(), strings.ReplaceAll(r.Repo, "/", "___") + second + ":" + r.Tag}
	}
	return []string{r.Local(), r.Local() + ":" + r.Tag}
}
