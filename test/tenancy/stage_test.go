package tenancy

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

func (s *stage) check(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// world is the part that differs between the versions: the cluster, and the node's back end.
type world interface {
	// create creates a pod as the operator of the cluster. author creates one as a user who may edit one namespace: why is
	// the reason if admission refuses it.
	create(p *corev1.Pod)
	author(p *corev1.Pod) (why string)
	// change changes a pod, remove deletes it.
	change(namespace, name string, f func(*corev1.Pod))
	remove(namespace, name string)
	// remembers returns the secret in the guest of a VM, and the id of its current boot, or "" if there is none.
	remembers(rec vm.Record) (secret, boot string)
	// again restarts the node.
	again()
	// closed checks that the kubelet API gives no access to static machines.
	closed(cases []Case)
}

// machine is the node below the cluster, as seen by its operator.
type machine interface {
	podprovider.Runtime
	podsnapshots.Snapshots
	PublishSnapshot(ctx context.Context, ref string, namespaces []string) (snapshot.Snapshot, error)
	ExportSnapshotDir(ctx context.Context, ref, dir string) error
}

// stage is a Stage.
type stage struct {
	t       *testing.T
	world   world
	client  kubernetes.Interface // the operator's
	machine machine
	url     string // of the registry
	token   string
	listed  string // folder that namespaces may clone from
	other   string // folder that they may not clone from
	kept    string // where the node keeps its snapshots
	image   string // that every namespace may run
	network string
	hub     *hub
	images  map[Whose]image.Image
	front   bool          // webhooks stand in front of the node
	pace    time.Duration // interval between polls
}

// patience is how long a pod may take to reach its state, on a busy machine.
const patience = 4 * time.Minute

// until calls why until it returns "".
func (s *stage) until(what string, why func() string) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(s.pace) {
		text := why()
		if text == "" {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: %s", what, text)
		}
	}
}

// as returns a context on behalf of a namespace, or of the operator.
func (s *stage) as(namespace string) context.Context {
	return vm.OnBehalf(s.t.Context(), vm.Owner{Namespace: namespace})
}

func (s *stage) get(namespace, name string) *corev1.Pod {
	s.t.Helper()
	p, err := s.client.CoreV1().Pods(namespace).Get(s.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	s.check(err)
	return p
}

// Pods implements Stage.
func (s *stage) Pods(all ...Victim) {
	s.t.Helper()
	for _, v := range all {
		p := (Case{Row: &Row{}}).Pod(s.image, nil)
		p.Namespace, p.Name, p.Annotations = v.Namespace, v.Name, maps.Clone(v.Annotations)
		p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: secretName, Value: v.Secret}}
		p.Spec.Containers[0].Command = keeps
		s.world.create(p)
	}
	for _, v := range all {
		s.until(v.String(), func() string { return unlike(s.sees(s.get(v.Namespace, v.Name)), GoesOn, v.Secret) })
		if v.Annotations[contract.KeyOfferFork] == "" {
			continue
		}
		s.until("forks of "+v.String(), func() string {
			_, err := s.machine.TagDigest(s.t.Context(), s.url+"/"+contract.Repository(v.Namespace, contract.VMName(v.Namespace, v.Name))+":fork", snapshot.Auth{Token: s.token})
			return text(err)
		})
	}
}

// keeps is a main process that stores its secret in a file in memory.
var keeps = []string{"sh", "-c", "echo \"$" + secretName + "\" >" + secretFile + "; exec sleep 1000000"}

// secretFile is that file.
const secretFile = "/dev/shm/secret"

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// secretName is the environment variable that holds a guest's secret.
const secretName = "SECRET"

// Hibernate implements Stage.
func (s *stage) Hibernate(all ...Victim) {
	s.t.Helper()
	for _, v := range all {
		s.world.change(v.Namespace, v.Name, func(p *corev1.Pod) { p.Annotations[contract.KeyHibernate] = "true" })
	}
	for _, v := range all {
		s.until(v.String(), func() string {
			p := s.get(v.Namespace, v.Name)
			if life := p.Annotations[contract.KeyLifecycleState]; life != string(contract.LifecycleHibernated) {
				return "it is " + life + " " + p.Annotations[contract.KeyLifecycleMessage]
			}
			return ""
		})
	}
}

// Delete implements Stage.
func (s *stage) Delete(all ...Victim) {
	s.t.Helper()
	for _, v := range all {
		s.world.remove(v.Namespace, v.Name)
	}
	for _, v := range all {
		s.until(v.String(), func() string {
			if s.get(v.Namespace, v.Name) != nil {
				return "it is there still"
			}
			return ""
		})
	}
}

// Launch implements Stage.
func (s *stage) Launch(all ...ByHand) {
	s.t.Helper()
	ids := make([]vm.ID, len(all))
	for i, h := range all {
		spec := vm.Spec{Name: h.Name, Image: s.image, CPUs: 1, Memory: 256 << 20, Labels: h.Labels, Offered: h.Offered, NICs: []vm.NICSpec{{}}}
		spec.Process.Entrypoint, spec.Process.Env = keeps, []vm.EnvVar{{Name: secretName, Value: h.Secret}}
		rec, err := s.machine.Launch(s.as(h.Namespace), spec.Default())
		s.check(err)
		ids[i] = rec.ID
	}
	for i, h := range all {
		s.until(h.Name, func() string {
			rec, err := s.machine.Inspect(s.t.Context(), string(ids[i]))
			s.check(err)
			if secret, _ := s.world.remembers(rec); !rec.AgentReady || secret != h.Secret {
				return fmt.Sprintf("it is %s, ready %v, and remembers %q", rec.State, rec.AgentReady, secret)
			}
			return ""
		})
	}
}

// Save implements Stage.
func (s *stage) Save(name, snap string, labels map[string]string, published ...string) {
	s.t.Helper()
	_, err := s.machine.SaveSnapshot(s.t.Context(), name, vm.SaveSpec{Name: snap, Labels: labels})
	s.check(err)
	_, err = s.machine.PublishSnapshot(s.t.Context(), snap, published)
	s.check(err)
}

// Rest implements Stage.
func (s *stage) Rest(name, snap string) {
	s.t.Helper()
	_, err := s.machine.Hibernate(s.t.Context(), name, snap)
	s.check(err)
}

// Push implements Stage.
func (s *stage) Push(namespace, snap, to string) {
	s.t.Helper()
	_, err := s.machine.PushSnapshot(s.as(namespace), snap, s.url+"/"+to, snapshot.Auth{Token: s.token}, nil)
	s.check(err)
}

// Forget implements Stage.
func (s *stage) Forget(snap string) {
	s.t.Helper()
	s.check(s.machine.RemoveSnapshot(s.t.Context(), snap))
}

// Export implements Stage.
func (s *stage) Export(namespace, snap string, listed bool) {
	s.t.Helper()
	dir := s.other
	if listed {
		dir = s.listed
	}
	s.check(s.machine.ExportSnapshotDir(s.t.Context(), vm.Owner{Namespace: namespace}.Qualify(snap), filepath.Join(dir, snap)))
}

// Link implements Stage.
func (s *stage) Link(namespace, snap string) {
	s.t.Helper()
	s.check(os.Symlink(s.folder(namespace, snap), filepath.Join(s.listed, "link-"+snap)))
}

// folder is where the node keeps a snapshot.
func (s *stage) folder(namespace, snap string) string {
	x, err := s.machine.GetSnapshot(s.as(namespace), snap)
	s.check(err)
	return filepath.Join(s.kept, x.ID)
}

// Image implements Stage.
func (s *stage) Image(w Whose) {
	s.t.Helper()
	s.hub.put(s.t, w)
	ns := ""
	if w == Own || w == Foreign {
		ns = w.prefix()
	}
	img, err := s.machine.Pull(s.as(ns), image.PullRequest{Name: s.hub.name(w), Policy: image.PullIfNotPresent, Auth: s.hub.auth(w)}, func(image.Progress) {})
	s.check(err)
	s.images[w] = img
	if w != Own {
		return
	}
	config := fmt.Appendf(nil, `{"auths":{%q:{"username":%q,"password":%q}}}`, s.hub.host, w.prefix(), w.Secret())
	_, err = s.client.CoreV1().Secrets(Dev).Create(s.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: Dev, Name: PullSecret}, Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: config},
	}, metav1.CreateOptions{})
	s.check(err)
}

// Object implements Stage.
func (s *stage) Object(namespace, name string) {
	s.t.Helper()
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	data := map[string]string{
		"authorized_keys": "ssh-ed25519 AAAA of " + namespace, "authorized_keys_path": "/a", "authorized_keys_encoding": "plain",
		"a": "b", "a_path": "/b", "a_encoding": "plain",
		contract.NetworkDataKey: "{version: 2, ethernets: {all: {match: {name: 'e*'}, dhcp4: true}}}", "networkdata_path": "/c", "networkdata_encoding": "plain",
	}
	_, err := s.client.CoreV1().ConfigMaps(namespace).Create(s.t.Context(), &corev1.ConfigMap{ObjectMeta: meta, Data: data}, metav1.CreateOptions{})
	s.check(err)
	secret := &corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{}}
	for k, v := range data {
		secret.Data[k] = []byte(v)
	}
	_, err = s.client.CoreV1().Secrets(namespace).Create(s.t.Context(), secret, metav1.CreateOptions{})
	s.check(err)
}

// find resolves what the cells refer to on the stage.
func (s *stage) find(w Whose, kind, thing string) string {
	s.t.Helper()
	ns := ""
	if w == Own || w == Foreign {
		ns = w.prefix()
	}
	name := w.VM(thing)
	if thing == "found" {
		name = w.prefix() + "-found"
	}
	switch snap, img := "fork-"+w.VM("db"), s.images[w]; kind {
	case "image":
		return s.hub.name(w)
	case "imagedigest":
		return strings.TrimSuffix(s.hub.name(w), ":1") + "@" + img.Digest
	case "imageid":
		return img.ID
	case "imageshort":
		return strings.TrimPrefix(img.ID, "sha256:")[:12]
	case "network":
		return s.network
	case "snapshot", "shortsnapshot":
		x, err := s.machine.GetSnapshot(s.as(ns), snap)
		s.check(err)
		if kind == "shortsnapshot" {
			return x.ID[:10]
		}
		return x.ID
	case "store":
		return s.folder(ns, snap)
	case "link":
		return filepath.Join(s.listed, "link-"+snap)
	case "dir":
		if w == Operators {
			return filepath.Join(s.other, snap)
		}
		return filepath.Join(s.listed, snap)
	}
	rec, err := s.machine.Inspect(s.as(ns), name)
	s.check(err)
	switch kind {
	case "id":
		return string(rec.ID)
	case "short":
		return string(rec.ID)[:10]
	case "ip":
		return rec.NICs[0].IP
	case "uid":
		return rec.Spec.Labels[contract.VMLabelPodUID]
	}
	s.t.Fatalf("the table asks for %s of %s", kind, thing)
	return ""
}
