"""What a precision costs in answers: held-out tasks and next-token losses under each choice, against float32."""
