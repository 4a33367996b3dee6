package contract

import (
	"regexp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Tags of a VM's snapshots in a registry; see Repository.
const (
	DefaultSnapshotTag   = "latest"    // saved before the VM was deleted
	HibernateSnapshotTag = "hibernate" // the state of the hibernated VM; removed after the VM wakes
	ForkSnapshotTag      = "fork"      // the state of the running VM, saved once for forks on other nodes; removed with the VM
)

// OwnerKind is the kind of the objects that own the pods of a CocoonSet.
const OwnerKind = "CocoonSet"

// The roles of a CocoonSet's pods (LabelSetRole).
const (
	RoleMain     = "main"
	RoleSubAgent = "sub-agent"
	RoleToolbox  = "toolbox"
)

// Member holds the fields of a pod that define its place in a CocoonSet.
type Member struct {
	Namespace string
	Labels    map[string]string
	Owners    []metav1.OwnerReference
}

// Set is the name of the CocoonSet that the pod belongs to, or "". An owner reference takes precedence over the label.
func (m Member) Set() string {
	for _, o := range m.Owners {
		if o.Kind == OwnerKind {
			return o.Name
		}
	}
	return m.Labels[LabelSetName]
}

// Main reports whether the VM of the pod is the main VM of its set: slot 0, by the exact form of its name. A toolbox is never
// the main VM, even if its name ends like slot 0. A pod without a set is not either.
func (m Member) Main(vmName string) bool {
	if role := m.Labels[LabelSetRole]; role != "" && role != RoleMain {
		return false
	}
	set := m.Set()
	return set != "" && (vmName == VMName(m.Namespace, set+"-0") || vmName == OldVMName(m.Namespace, set+"-0"))
}

// ShouldSnapshotVM reports whether the policy of s requires to save the VM before it is deleted. main says whether it is the
// main VM of its set. An empty policy means always.
func ShouldSnapshotVM(s VMSpec, main bool) bool {
	switch s.SnapshotPolicy {
	case SnapshotNever:
		return false
	case SnapshotMainOnly:
		return main
	case SnapshotAlways:
		return true
	}
	return true // the safe default: saving loses nothing
}

// AsksSnapshot reports whether the VM with these annotations uses snapshots at all: it is managed, or its policy is set. Any
// other pod behaves as usual in Kubernetes: its data is deleted with it.
func AsksSnapshot(annotations map[string]string) bool {
	return annotations[KeyManaged] == "true" || annotations[KeySnapshotPolicy] != ""
}

// RestoreFromHibernate reports whether the VM must resume from its hibernated state and must not boot.
func RestoreFromHibernate(annotations map[string]string) bool {
	return annotations[KeyRestoreFromHibernate] == "true"
}

// KeepSnapshot reports whether this delete only frees the place on the node: nothing is saved, and the tags stay.
func KeepSnapshot(annotations map[string]string) bool { return annotations[KeyKeepSnapshot] == "true" }

// OfferFork reports whether the VM's state must be in the registry for its forks.
func OfferFork(annotations map[string]string) bool { return annotations[KeyOfferFork] == "true" }

// SnapshotRef names a snapshot by repository and tag.
type SnapshotRef struct {
	Repo string
	Tag  string // never empty
}

// A repository follows the OCI distribution spec, but may have capitals: a snapshot that is in no registry may have them.
var (
	repoRE = regexp.MustCompile(`^[A-Za-z0-9]+((\.|_|__|-+)[A-Za-z0-9]+)*(/[A-Za-z0-9]+((\.|_|__|-+)[A-Za-z0-9]+)*)*$`)
	tagRE  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$`)
)

var pushableRE = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$`)

// Pushable reports whether a VM of that name can be saved to a registry, where its name becomes the name of a repository.
func Pushable(vmName string) bool { return pushableRE.MatchString(vmName) }

const maxLocalName = 127 // characters of a snapshot's name on a node

// ParseSnapshotRef parses repo[:tag], which names a snapshot to clone. It accepts no registry host, because the node knows its
// registry, and no digest, because a digest does not name a snapshot. The error is a KeyError of KeyImage.
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

// String is the ref as repo:tag.
func (r SnapshotRef) String() string { return r.Repo + ":" + r.Tag }

// Local is the name of the snapshot on a node: repo:tag, or the bare repository if the tag is latest. Names on a node have no
// slashes: three underscores, which no repository may have, replace each slash.
func (r SnapshotRef) Local() string {
	name := strings.ReplaceAll(r.Repo, "/", "___")
	if r.Tag != DefaultSnapshotTag {
		name += ":" + r.Tag
	}
	return name
}

// LocalSnapshotRef parses a name that Locals made. The error is a KeyError.
func LocalSnapshotRef(name string) (SnapshotRef, error) {
	return ParseSnapshotRef(strings.ReplaceAll(strings.Replace(name, second+":", ":", 1), "___", "/"))
}

// second marks the second name of a snapshot that has a tag. No repository ends with it.
const second = "___"

// Locals are the two names that the snapshot may have on a node: the bare repository and repo:latest, or repo:tag and
// repo___:tag. With two names, a newer snapshot can exist before the older one is removed.
func (r SnapshotRef) Locals() []string {
	if r.Tag != DefaultSnapshotTag {
		return []string{r.Local(), strings.ReplaceAll(r.Repo, "/", "___") + second + ":" + r.Tag}
	}
	return []string{r.Local(), r.Local() + ":" + r.Tag}
}
