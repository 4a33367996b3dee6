package vkcocoon

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// newBroadcaster sends the Events of the node. client-go limits how many an object has, so that one which fails all the time does not fill
// the cluster. Here each reason has a limit of its own: a probe that fails every second never costs a Pod its rare Events.
func newBroadcaster(ctx context.Context) record.EventBroadcaster {
	return record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{SpamKeyFunc: limitedAs}))
}

// limitedAs names the limit that an Event counts for.
func limitedAs(e *corev1.Event) string {
	on := e.InvolvedObject
	return strings.Join([]string{on.APIVersion, on.Kind, on.Namespace, on.Name, string(on.UID), e.Type, e.Reason}, "/")
}
