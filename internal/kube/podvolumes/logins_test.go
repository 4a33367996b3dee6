package podvolumes

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// doorman notes the logins that a guest gets, and what is told of them.
type doorman struct {
	mu   sync.Mutex
	got  []string
	told []string
	err  error
}

func (d *doorman) owner(pod *corev1.Pod) Owner {
	return Owner{
		Pod:      func() *corev1.Pod { return pod },
		Complain: func(vm.ID, error) { panic("no volume is updated") },
		SetLogins: func(_ context.Context, _ string, l guest.Logins) error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.err != nil {
				return d.err
			}
			text, _ := json.Marshal(l)
			d.got = append(d.got, string(text))
			return nil
		},
		LoginsSet: func(err error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if text := "set"; err != nil {
				d.told = append(d.told, err.Error())
			} else {
				d.told = append(d.told, text)
			}
		},
	}
}

// seen returns the last logins, how many there were, and what was told last.
func (d *doorman) seen() (last string, n int, told string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.got) > 0 {
		last = d.got[len(d.got)-1]
	}
	if len(d.told) > 0 {
		told = d.told[len(d.told)-1]
	}
	return last, len(d.got), told
}

func (d *doorman) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// A guest gets its logins when its agent answers, again when a Secret changes, and again when an agent answers anew.
func TestLoginsFollowTheirSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spawn, end := spawner(t)
		defer end()
		secret := func(name, key, value string) *corev1.Secret {
			return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string][]byte{key: []byte(value)}}
		}
		client := fake.NewClientset(secret("team", "one", "ssh-ed25519 AAAA ann\n# a comment\n"))
		o := NewObjects(client, slog.New(slog.DiscardHandler))
		o.Start(spawn)
		change := func(s *corev1.Secret) {
			t.Helper()
			if _, err := client.CoreV1().Secrets("default").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: map[string]string{
			contract.KeyLogins: `{"keys": {"team": ["debian"]}, "passwords": ["words"]}`,
		}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
		d := &doorman{}
		v := New(o, convert.Node{}, d.owner(pod))
		check := func(what string, want string, wantN int, wantTold string) {
			t.Helper()
			time.Sleep(2 * retryMost) //nolint:forbidigo // the fake clock of synctest
			synctest.Wait()
			if last, n, told := d.seen(); last != want || n != wantN || told != wantTold {
				t.Errorf("%s: %s after %d, %s; want %s after %d, %s", what, last, n, told, want, wantN, wantTold)
			}
		}
		keep := func(agent bool) { v.Keep(pod, &vm.Record{ID: "id", ImageType: vm.ImageDisk, AgentReady: agent}, spawn) }
		missing := contract.KeyLogins + `: secret "words" not found`
		keep(false)
		check("a Secret is missing", "", 0, missing)
		if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret("words", "ann", "sesame\n"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		check("the guest boots", "", 0, missing)
		keep(true)
		one := `{"Passwords":{"ann":"sesame"},"Keys":{"debian":["ssh-ed25519 AAAA ann"]}}`
		check("its agent answers", one, 1, "set")
		keep(true)
		check("nothing changes", one, 1, "set")
		change(secret("team", "one", ""))
		two := `{"Passwords":{"ann":"sesame"},"Keys":{"debian":null}}`
		check("no key is left", two, 2, "set")
		keep(false)
		change(secret("words", "ann", "melon"))
		check("it reboots", two, 2, "set")
		keep(true)
		three := `{"Passwords":{"ann":"melon"},"Keys":{"debian":null}}`
		check("it is up again", three, 3, "set")
		keep(false)
		keep(true)
		check("it went back to a snapshot", three, 4, "set")

		d.fail(errdefs.Unavailablef("it boots"))
		change(secret("words", "ann", "plum"))
		check("it does not answer", three, 4, "set")
		d.fail(errdefs.Preconditionf("no such user"))
		check("it refuses", three, 4, "no such user")
		d.fail(nil)
		check("it has the user now", `{"Passwords":{"ann":"plum"},"Keys":{"debian":null}}`, 5, "set")
		change(secret("words", "ann", "a\nroot:b"))
		check("a password that is none", `{"Passwords":{"ann":"plum"},"Keys":{"debian":null}}`, 5, `the password of user "ann" must have 1 to 512 bytes and no control characters`)
		change(secret("words", "ann", "plum"))
		check("as before", `{"Passwords":{"ann":"plum"},"Keys":{"debian":null}}`, 6, "set")
		v.Stop()
		synctest.Wait()
		if !slices.Contains(d.told, "set") || len(o.all) != 0 {
			t.Errorf("%d objects are watched after the end", len(o.all))
		}
	})
}
