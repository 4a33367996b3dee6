package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// put stores a snapshot in the registry at REPOSITORY:TAG, without a change.
func (r *registry) put(at, text string, snap snapshot.Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	digest := "sha256:" + text
	r.tags[registryURL+"/"+at], r.blobs[digest], r.text[digest] = digest, snap, text
}

// says returns a snapshot with the labels that an earlier release set on the state of a pod's VM.
func says(namespace, pod string) snapshot.Snapshot {
	return snapshot.Snapshot{Labels: map[string]string{contract.VMLabelPodNamespace: namespace, contract.VMLabelPodName: pod}}
}

// of sets namespace and name of a pod, because several pods of a test may share an old VM name.
func of(namespace, name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Namespace, p.Name, p.UID = namespace, name, types.UID("uid-of-"+namespace) }
}

func (w *world) see(namespace, name string) *corev1.Pod {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods(namespace).Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// A state that an earlier release stored in the registry is found if it belongs to the pod. Afterwards it is in the new place.
func TestAStateOfAnEarlierRelease(t *testing.T) {
	const (
		repo   = "vk-prod-eu-db" // the old VM name of both prod-eu/db and prod/eu-db
		old    = repo + ":hibernate"
		place  = "prod-eu/vk--prod-eu.db:hibernate"
		woken  = "Running running ready"
		waits  = "Pending waiting:CreateContainerError"
		vmName = "vk--prod-eu.db"
	)
	for name, tc := range map[string]struct {
		there map[string]snapshot.Snapshot // by place; the content is the place's name
		trust bool
		must  bool // the pod says that a state exists
		want  string
		knows string // memory content of the guest; "": a new VM booted
		left  bool   // the state stays in the old place
	}{
		"of the pod, restore asked for":           {map[string]snapshot.Snapshot{old: says("prod-eu", "db")}, false, true, woken, old, false},
		"of the pod":                              {map[string]snapshot.Snapshot{old: says("prod-eu", "db")}, false, false, woken, old, false},
		"of the other pod":                        {map[string]snapshot.Snapshot{old: says("prod", "eu-db")}, true, false, woken, "", true},
		"of the other pod, restore asked for":     {map[string]snapshot.Snapshot{old: says("prod", "eu-db")}, true, true, waits, "", true},
		"of another pod of the namespace":         {map[string]snapshot.Snapshot{old: says("prod-eu", "x")}, true, false, woken, "", true},
		"without an owner":                        {map[string]snapshot.Snapshot{old: {}}, false, false, waits, "", true},
		"without an owner, restore asked for":     {map[string]snapshot.Snapshot{old: {}}, false, true, waits, "", true},
		"without an owner, old names are trusted": {map[string]snapshot.Snapshot{old: {}}, true, true, woken, old, false},
		"in the old and in the new place":         {map[string]snapshot.Snapshot{old: says("prod-eu", "db"), place: {Owner: vm.Owner{Namespace: "prod-eu"}}}, false, true, woken, place, true},
		"nowhere":                                 {nil, true, false, woken, "", false},
		"no state, restore asked for":             {nil, true, true, waits, "", false},
		"in the new place, but of the other pod":  {map[string]snapshot.Snapshot{place: {Owner: vm.Owner{Namespace: "prod"}}}, true, true, waits, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				for at, snap := range tc.there {
					s.registry.put(at, at, snap)
				}
				cfg := keepingConfig(false)
				cfg.Registry.TrustOld = tc.trust
				w := keeping(t, s, true)
				w.stop()
				w.run(cfg)
				defer w.stop()
				mine := []func(*corev1.Pod){of("prod-eu", "db"), managedRun}
				if tc.must {
					mine = append(mine, asks(map[string]string{contract.KeyRestoreFromHibernate: "true"}))
				}
				w.create(pod(mine...))
				w.pass(10 * time.Minute)
				p := w.see("prod-eu", "db")
				expect(t, p, tc.want)
				if tc.want == woken && s.knows(vmName) != tc.knows {
					t.Errorf("the guest knows %q, want %q", s.knows(vmName), tc.knows)
				}
				if tc.want == waits && s.count() != 0 {
					t.Errorf("%d VMs of a pod that waits", s.count())
				}
				if got := s.registry.has(repo, "hibernate"); (got != "") != tc.left {
					t.Errorf("in the old place is %q", got)
				}
				if _, there := tc.there[old]; tc.want == woken && tc.knows != "" && s.registry.has("prod-eu/vk--prod-eu.db", "hibernate") != "" {
					t.Errorf("the VM is awake, but its state is still in the registry, old place %v", there)
				}
				if n := s.registry.called("pull " + registryURL + "/" + repo + "@sha256:" + old); n > 1 && tc.knows != old {
					t.Errorf("a state of another owner was pulled %d times", n)
				}
				if tc.knows == "" && tc.there[old].Labels[contract.VMLabelPodNamespace] != "prod-eu" && strings.Contains(strings.Join(s.kept, " "), "prod-eu/") { // never owned by the namespace
					t.Errorf("snapshots with their owners: %v", s.kept)
				}
				if s.names() != "" {
					t.Errorf("left on the node: %s", s.names())
				}
			})
		})
	}
}

// If a state does not name its owner, the Event has the commands with which the operator sets the owner. After these commands,
// the pod wakes.
func TestAnOldStateWaitsForTheOperator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		state := snapshot.Snapshot{Source: snapshot.Source{VMID: vm.NewID()}, CreatedAt: time.Now()}
		s.registry.put("vk-prod-eu-db:hibernate", "slept", state)
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(of("prod-eu", "db"), managedRun))
		w.pass(time.Minute)
		expect(t, w.see("prod-eu", "db"), "Pending waiting:CreateContainerError")
		w.expectTold("`cocoon snapshot pull --name moved "+registryURL+"/vk-prod-eu-db:hibernate`", "`cocoon snapshot push moved "+registryURL+"/prod-eu/vk--prod-eu.db:hibernate`", "VK_TRUST_OLD_SNAPSHOTS=true")
		s.registry.put("prod-eu/vk--prod-eu.db:hibernate", "moved", state)
		w.pass(2 * time.Minute)
		expect(t, w.see("prod-eu", "db"), "Running running ready")
		if got := s.knows("vk--prod-eu.db"); got != "moved" {
			t.Errorf("the guest knows %q", got)
		}
		if len(s.registry.tags) > 0 { // the next VM of the name would wait again
			t.Errorf("the VM is awake, and the registry has %v", s.registry.tags)
		}
	})
}

// A process was killed while it checked a snapshot of an old place. The snapshot is on the node, under the owner that it
// names. The next process checks it again.
func TestAnOldStateIsCheckedAgain(t *testing.T) {
	for name, snap := range map[string]snapshot.Snapshot{"of the pod": says("prod-eu", "db"), "without an owner": {}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				s.registry.put("vk-prod-eu-db:hibernate", "slept", snap)
				left := snap
				left.Name, left.Owner.Namespace = "unclaimed-sha256-slept", snap.Labels[contract.VMLabelPodNamespace]
				if _, err := s.put(left, "slept"); err != nil {
					t.Fatal(err)
				}
				w := keeping(t, s, true)
				w.stop()
				cfg := keepingConfig(false)
				cfg.Registry.TrustOld = true
				w.run(cfg)
				defer w.stop()
				w.create(pod(of("prod-eu", "db"), managedRun))
				w.pass(time.Minute)
				expect(t, w.see("prod-eu", "db"), "Running running ready")
				if s.knows("vk--prod-eu.db") != "slept" || s.names() != "" {
					t.Errorf("the guest knows %q, here is %s", s.knows("vk--prod-eu.db"), s.names())
				}
			})
		})
	}
}

// Two pods had the same VM name in an earlier release. Each wakes with its own memory, and the state of the other stays.
func TestTwoPodsOfOneOldName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.registry.put("vk-prod-eu-db:hibernate", "of prod/eu-db", says("prod", "eu-db"))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(of("prod-eu", "db"), managedRun))
		w.pass(time.Minute)
		expect(t, w.see("prod-eu", "db"), "Running running ready")
		if got := s.knows("vk--prod-eu.db"); got != "" {
			t.Errorf("prod-eu/db knows %q", got)
		}
		w.create(pod(of("prod", "eu-db"), managedRun))
		w.pass(time.Minute)
		expect(t, w.see("prod", "eu-db"), "Running running ready")
		if got := s.knows("vk-prod-eu-db"); got != "of prod/eu-db" {
			t.Errorf("prod/eu-db knows %q", got)
		}
		if got := s.registry.has("vk-prod-eu-db", "hibernate"); got != "" {
			t.Errorf("in the old place is %q still", got)
		}
	})
}

// A VM was hibernated on this node by an earlier release. The node knows the digest of the state that it pushed, and moves the
// state to the new place. If the VM is woken before that, no state is left from which a later VM would resume.
func TestHibernatedStateOfAnEarlierReleaseIsMoved(t *testing.T) {
	for name, woken := range map[string]bool{"hibernated": false, "woken immediately": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w := keeping(t, s, false)
				w.create(pod(managedRun))
				w.after(time.Second)
				s.knows(vmName, "slept")
				w.annotate(contract.KeyHibernate, "true")
				expect(t, w.after(time.Second), asleepPod)
				w.stop()
				s.registry.mu.Lock() // as the earlier release stored it
				s.registry.tags[registryURL+"/"+vmName+":hibernate"] = s.registry.tags[registryURL+"/"+vmRepo+":hibernate"]
				delete(s.registry.tags, registryURL+"/"+vmRepo+":hibernate")
				s.registry.mu.Unlock()
				s.registry.put("vk-default-other:hibernate", "another's", snapshot.Snapshot{})
				if woken {
					p := w.see("default", "web")
					delete(p.Annotations, contract.KeyHibernate)
					if _, err := w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				w.run(keepingConfig(false))
				defer w.stop()
				w.pass(time.Minute)
				if got := s.registry.has(vmName, "hibernate"); got != "" {
					t.Errorf("in the old place is %q still", got)
				}
				if got := s.registry.has(vmRepo, "hibernate"); (got == "slept") == woken {
					t.Errorf("the new place has %q", got)
				}
				if !woken {
					w.annotate(contract.KeyHibernate, "")
					w.pass(time.Minute)
				}
				expect(t, w.see("default", "web"), "Running running ready")
				if s.knows(vmName) != "slept" || s.registry.has("vk-default-other", "hibernate") == "" || len(s.registry.tags) != 1 {
					t.Errorf("the guest knows %q, the registry has %v", s.knows(vmName), s.registry.tags)
				}
			})
		})
	}
}

// Every namespace may clone from a repository that the operator makes public, but not from other repositories, and not from
// states of VMs.
func TestPublicRepositories(t *testing.T) {
	const none = "none is shared with it"
	for name, tc := range map[string]struct {
		public, image, at string
		of                vm.Owner
		why               string // "": it is cloned
	}{
		"by its name":                 {"team/base", "team/base:v2", "team/base:v2", vm.Owner{}, ""},
		"latest":                      {"base", "base", "base:latest", vm.Owner{}, ""},
		"below a beginning":           {"team/", "team/sub/base", "team/sub/base:latest", vm.Owner{}, ""},
		"among several":               {"a,team/,base", "base:v2", "base:v2", vm.Owner{}, ""},
		"nothing is public":           {"", "base", "base:latest", vm.Owner{}, none},
		"another":                     {"team/base", "team/basement", "team/basement:latest", vm.Owner{}, none},
		"below a name":                {"team", "team/base", "team/base:latest", vm.Owner{}, none},
		"of a namespace":              {"team/", "prod/base", "prod/base:latest", vm.Owner{}, none},
		"a state of a VM":             {"prod/", "prod/base:hibernate", "prod/base:hibernate", vm.Owner{}, none},
		"a state for forks":           {"prod/", "prod/base:fork", "prod/base:fork", vm.Owner{}, none},
		"another namespace's VM":      {"prod/", "prod/vk-prod-db", "prod/vk-prod-db:latest", vm.Owner{}, "is the name of a VM of another namespace"},
		"memory of a namespace":       {"prod/", "prod/base", "prod/base:latest", vm.Owner{Namespace: "prod"}, "none of this name belongs to namespace default"},
		"its own before a public one": {"base", "base", "default/base:latest", vm.Owner{Namespace: "default"}, ""},
		"its own, nothing is public":  {"", "base", "default/base:latest", vm.Owner{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				s.registry.put("base:latest", "the public one", snapshot.Snapshot{})
				s.registry.put(tc.at, "it", snapshot.Snapshot{Owner: tc.of})
				w := keeping(t, s, true)
				w.stop()
				cfg := keepingConfig(false)
				if tc.public != "" {
					cfg.Registry.Public = strings.Split(tc.public, ",")
				}
				w.run(cfg)
				defer w.stop()
				w.create(pod(asks(map[string]string{contract.KeyMode: "clone", contract.KeyImage: tc.image})))
				p := w.after(time.Second)
				if tc.why == "" {
					expect(t, p, "Running running ready")
					if got := s.knows(vmName); got != "it" {
						t.Errorf("the guest knows %q", got)
					}
					return
				}
				if ready(p) || s.count() != 0 {
					t.Errorf("pod is %s, %d VMs", sketch(p), s.count())
				}
				w.expectTold(tc.why)
			})
		})
	}
}

// A force-pull that fails keeps the local snapshot and shows the reason. When a pull succeeds, the newer snapshot is used.
func TestAForcePullThatFails(t *testing.T) {
	for name, tc := range map[string]struct {
		break_ func(*fakeSnapshots)
		mend   func(*fakeSnapshots)
		why    string
	}{
		"the registry is unavailable": {
			func(s *fakeSnapshots) { s.registry.fall(errdefs.Unavailablef("the registry is unavailable")) },
			func(s *fakeSnapshots) { s.registry.fall(nil) },
			"the registry is unavailable",
		},
		"the pull fails": {
			func(s *fakeSnapshots) {
				s.fail(&s.pullAs, func() error { return errdefs.DataLossf("the disk is damaged there") })
			},
			func(s *fakeSnapshots) { s.fail(&s.pullAs, nil) },
			"pull snapshot " + registryURL + "/default/base:latest: the disk is damaged there",
		},
		"the tag was removed from the registry": {
			func(s *fakeSnapshots) { delete(s.registry.tags, registryURL+"/default/base:latest") },
			func(s *fakeSnapshots) { s.registry.put("default/base:latest", "newer", snapshot.Snapshot{}) },
			"namespace default has no snapshot base:latest on this node or in the registry",
		},
		"the tag belongs to another namespace": {
			func(s *fakeSnapshots) {
				s.registry.put("default/base:latest", "stolen", snapshot.Snapshot{Owner: vm.Owner{Namespace: "prod"}})
			},
			func(s *fakeSnapshots) { s.registry.put("default/base:latest", "newer", snapshot.Snapshot{}) },
			"none of this name belongs to namespace default",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				mine := vm.Owner{Namespace: "default"}
				here, err := s.put(snapshot.Snapshot{Name: "base", Owner: mine, Digest: "sha256:older"}, "older")
				if err != nil {
					t.Fatal(err)
				}
				s.registry.put("default/base:latest", "newer", snapshot.Snapshot{})
				tc.break_(s)
				w := keeping(t, s, false)
				defer w.stop()
				w.create(pod(asks(map[string]string{contract.KeyMode: "clone", contract.KeyImage: "base", contract.KeyForcePull: "true"})))
				p := w.after(5 * time.Second)
				expect(t, p, "Pending waiting:CreateContainerError")
				if m := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(m, tc.why) {
					t.Errorf("the pod waits because of %q", m)
				}
				w.expectTold(tc.why)
				if got, err := s.GetSnapshot(t.Context(), here.ID); err != nil || s.content[got.ID] != "older" || s.names() != "base" {
					t.Errorf("snapshots on the node: %s, the local snapshot: %+v %v", s.names(), got, err)
				}
				tc.mend(s)
				expect(t, w.after(2*time.Minute), "Running running ready")
				if s.knows(vmName) != "newer" || s.names() != "base:latest" {
					t.Errorf("the guest knows %q, here is %s", s.knows(vmName), s.names())
				}
			})
		})
	}
}
