package vkcocoon

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
)

// sink tells the reason of each Event that is written.
type sink chan string

func (s sink) take(e *corev1.Event) (*corev1.Event, error) {
	s <- e.Reason
	return e, nil
}

func (s sink) Create(e *corev1.Event) (*corev1.Event, error)          { return s.take(e) }
func (s sink) Update(e *corev1.Event) (*corev1.Event, error)          { return s.take(e) }
func (s sink) Patch(e *corev1.Event, _ []byte) (*corev1.Event, error) { return s.take(e) }

// A Pod whose probe fails all the time still tells what is rare.
func TestRareEventsAreTold(t *testing.T) {
	b := newBroadcaster(t.Context())
	told := make(sink, 100)
	b.StartRecordingToSink(told)
	defer b.Shutdown()
	recorder := b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "vk-cocoon"})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "1"}}
	for range 60 {
		recorder.Event(pod, corev1.EventTypeWarning, "Unhealthy", "Readiness probe failed")
	}
	recorder.Event(pod, corev1.EventTypeWarning, "FailedLogins", "no such user")
	late := time.After(30 * time.Second)
	probes := 0
	for {
		select {
		case reason := <-told:
			if reason == "FailedLogins" {
				if probes >= 60 {
					t.Errorf("%d Events of a failed probe are written, want a limit", probes)
				}
				return
			}
			probes++
		case <-late:
			t.Fatal("the Event after those of the probe is not written")
		}
	}
}

var _ record.EventSink = sink(nil)
